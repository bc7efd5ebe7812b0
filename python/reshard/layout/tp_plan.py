"""A tensor-parallel plan of transformers as a layout mapping.

A plan maps names of modules or parameters to styles; transformers (4.50 to 5.x) shards `weight` and `bias` of each
module by its style. `*` in a name stands for a number. Only the effect of a style on stored tensors matters here, not
that on activations; most styles leave stored tensors whole.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from reshard.errors import ArgumentError, LayoutError
from reshard.layout.patterns import Pattern
from reshard.values.words import nearest, show

if TYPE_CHECKING:
    from collections.abc import Mapping

# Linear weights are [out, in]; a parameter of stacked experts is [expert, ., .]: styles count its dims from the end.
_COLUMN = frozenset({"colwise", "colwise_gather_output", "colwise_rep", "local_colwise"})
_ROW = frozenset({"rowwise", "rowwise_rep", "rowwise_split_input", "local_rowwise"})
_PACKED_COLUMN = frozenset({"packed_colwise", "local_packed_colwise"})
_PACKED_ROW = frozenset({"packed_rowwise", "local_packed_rowwise"})
_VOCABULARY = frozenset({"embedding_rowwise"})
_EMBEDDING = frozenset({"embedding_colwise"})
_EXPERTS = frozenset({"grouped_gemm"})
_WHOLE = frozenset(
    {
        "all_reduce",
        "ep_dispatch_experts",
        "ep_router",
        "gather",
        "local",
        "local_params",
        "mla_kv_a_proj",
        "moe_identity_expert",
        "moe_tp_experts",
        "replicate",
        "replicated_with_grad_allreduce",
        "sequence_parallel",
    }
)
_KNOWN = _COLUMN | _ROW | _PACKED_COLUMN | _PACKED_ROW | _VOCABULARY | _EMBEDDING | _EXPERTS | _WHOLE


def mapping_of_plan(plan: Mapping[str, str], tp: int) -> dict[str, object]:
    """The layout mapping of a plan. Arguments and errors as in `ModelLayout.from_tp_plan`."""
    if not isinstance(tp, int) or isinstance(tp, bool) or tp < 1:
        raise ArgumentError(f"tp must be an integer of at least 1, found {tp!r}")
    for name, style in plan.items():
        if style not in _KNOWN:
            near = nearest(str(style), _KNOWN, n=1)
            hint = f"did you mean `{near[0]}`? " if near else ""
            known = ", ".join(sorted(_KNOWN))
            raise LayoutError(
                f"the plan gives {show(name)} the unknown style {show(str(style))}", hint=f"{hint}known are {known}"
            )
    # A plan is for a class of models; a model may lack some of the modules that it names.
    rules = [{**rule, "optional": True} for name in _specific_first(plan) for rule in _rules(name, plan)]
    return {"mesh": {"tp": tp}, "rules": [*rules, {"match": "*"}]}


def _specific_first(plan: Mapping[str, str]) -> list[str]:
    """The names in the order of the plan, but each before the wider ones that would take its keys.

    In a plan one name decides, whatever the order; in a layout the first rule that matches does.
    """
    patterns = [Pattern.compile(f"*{name}") for name in plan]
    n_wider = {name: sum(pattern.matches(name.replace("*", "0")) for pattern in patterns) for name in plan}
    return sorted(plan, key=lambda name: -n_wider[name])


def _rules(name: str, plan: Mapping[str, str]) -> list[dict[str, object]]:
    style = plan[name]
    own, weight, bias = f"*{name}", f"*{name}.weight", f"*{name}.bias"
    # `experts.gate_up_proj` and the like are parameters of stacked experts; other names are modules, or parameters of
    # one dim such as attention sinks, which are cut as a bias is.
    stacked = name.split(".")[-2:-1] == ["experts"]
    column: dict[str, object] = (
        {"match": own, "cut": [None, "tp"]} if stacked else {"match": [weight, bias], "cut": ["tp"]}
    )
    row: dict[str, object] = {"match": own if stacked else weight, "cut": [*[None] * (2 if stacked else 1), "tp"]}
    # Torch chunks a dim that does not divide; the packed styles and the experts must divide.
    if style in _COLUMN:
        return [{**column, "uneven": "ceil"} if stacked else {**column, "match": [weight, bias, own], "uneven": "ceil"}]
    if style in _ROW | _EMBEDDING:
        return [{**row, "uneven": "ceil"}]
    if style in _PACKED_COLUMN:
        return [{**column, "blocks": {1 if stacked else 0: 2}}]
    if style in _PACKED_ROW:
        return [{**row, "blocks": {2 if stacked else 1: 2}}]
    if style in _VOCABULARY:
        return [{"match": weight, "cut": ["tp"], "uneven": "ceil"}]
    if style in _EXPERTS:
        return [{"match": [own, weight, bias], "cut": ["tp"]}]
    # The last rule leaves a tensor whole, unless a wider name of the plan matches before it.
    wider = [other for other in plan if other != name and Pattern.compile(f"*{other}").matches(name.replace("*", "0"))]
    return [{"match": [own, weight, bias]}] if wider else []
