"""What the state of optimizers is, by the name of its slot: which values cannot be negative, which are fp32 weights.

Optimizers do not describe their state, so the names are listed: those of torch, bitsandbytes, transformers, DeepSpeed,
Megatron-Core and MindSpore.
"""

from __future__ import annotations

_NON_NEGATIVE = frozenset(
    (
        # Adam and those that have its names: AdamW, NAdam, RAdam, LAMB, SOAP, Prodigy
        *("exp_avg_sq", "max_exp_avg_sq", "max_exp_avg_sqs", "exp_avg_sq_row", "exp_avg_sq_col", "exp_avg_sqs"),
        # torch: RMSprop and Adadelta, Adadelta, Adagrad, Adamax, Adafactor, Rprop
        *("square_avg", "acc_delta", "sum", "exp_inf", "row_var", "col_var", "variance", "step_size"),
        # bitsandbytes: the second state; of its optimizers only those of Adam's kind have one that is not quantised
        "state2",
        # MindSpore
        *("adam_v", "vhat", "mean_square", "accum"),
    )
)
_MASTERS = frozenset(("fp32", "fp32_param", "param", "master_param", "master_weight", "master"))


def is_non_negative(slot: str) -> bool:
    """Whether values of a slot below zero are wrong: it is a mean, a sum or a maximum of squares or magnitudes.

    Example:
        >>> is_non_negative("exp_avg_sq"), is_non_negative("exp_avg")
        (True, False)
    """
    return slot in _NON_NEGATIVE


def is_master(slot: str) -> bool:
    """Whether a slot holds the weight in the precision in which it is updated.

    Example:
        >>> is_master("fp32_param"), is_master("exp_avg")
        (True, False)
    """
    return slot in _MASTERS
