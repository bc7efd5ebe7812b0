"""Adapters of peft, written from a checkpoint: the files are those of `save_pretrained`, and peft loads them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch
from tests.helpers.ranks import Job
from tests.peers.required import required
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import reshard
from reshard.errors import ArgumentError, MismatchError, UnsupportedError
from reshard.torch import Checkpointer
from reshard.torch.adapters import Adapter, adapters_of, write_adapters
from reshard.transformers import ReshardCallback

if TYPE_CHECKING:
    from pathlib import Path

    from reshard.ranks.group import TorchGroup

peft = required("peft")
transformers = required("transformers")


def base() -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2
    )
    return transformers.LlamaForCausalLM(config)


def moved(model: Any) -> Any:
    """The model with other values of all its adapters, as after a training."""
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter))
    return model


CONFIGS: dict[str, Any] = {
    "lora": lambda: peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"),
    "lora without a task": lambda: peft.LoraConfig(r=2, target_modules="all-linear"),
    "dora": lambda: peft.LoraConfig(r=2, target_modules=["q_proj"], use_dora=True, task_type="CAUSAL_LM"),
    "biases": lambda: peft.LoraConfig(r=2, target_modules=["q_proj"], bias="all", task_type="CAUSAL_LM"),
    "whole head": lambda: peft.LoraConfig(
        r=2, target_modules=["q_proj"], modules_to_save=["lm_head"], task_type="CAUSAL_LM"
    ),
    "embedding": lambda: peft.LoraConfig(r=2, target_modules=["q_proj", "embed_tokens"], task_type="CAUSAL_LM"),
    "ia3": lambda: peft.IA3Config(target_modules=["k_proj"], feedforward_modules=[], task_type="CAUSAL_LM"),
    "loha": lambda: peft.LoHaConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"),
    "vera": lambda: peft.VeraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"),
}


def saved(root: Path, model: Any, **options: Any) -> str:
    """The folder of a save of the model."""
    with Checkpointer(root, save_every=1, signals=(), **options) as checkpointer:
        checkpointer.resume(model=model)
        checkpointer.step(1)
    return str(root / "iteration_00000001")


def check_folder(found: Path, right: Path) -> None:
    """The weights are those of another folder, bit for bit, and the configuration says the same."""
    with (
        reshard.open(found / "adapter_model.safetensors") as one,
        reshard.open(right / "adapter_model.safetensors") as two,
    ):
        assert sorted(one) == sorted(two)
        for key in one:
            assert one.read(key).tobytes() == two.read(key).tobytes(), key
    first, second = (json.loads((folder / "adapter_config.json").read_text()) for folder in (found, right))
    for value in (first, second):  # sets, in any order
        value["target_modules"] = sorted(value["target_modules"] or [])
    assert first == second


@pytest.mark.slow(disk=False)
@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.filterwarnings("ignore")
def test_folders_are_those_of_the_library(kind: str, tmp_path: Path) -> None:
    model = moved(peft.get_peft_model(base(), CONFIGS[kind]()))
    model.save_pretrained(str(tmp_path / "right"), save_embedding_layers="auto")
    saved(tmp_path / "run", model, hf_every=1)
    folder = tmp_path / "run_hf" / "iteration_00000001"
    check_folder(folder, tmp_path / "right")
    again = peft.PeftModel.from_pretrained(base(), str(folder))
    given = torch.arange(8)[None]
    with torch.no_grad():
        assert torch.equal(again.eval()(given).logits, model.eval()(given).logits)


@pytest.mark.filterwarnings("ignore")
def test_several_adapters_are_in_folders_of_their_names(tmp_path: Path) -> None:
    model = peft.get_peft_model(base(), CONFIGS["lora"]())
    model.add_adapter("second", peft.LoraConfig(r=3, target_modules=["k_proj"], task_type="CAUSAL_LM"))
    model = moved(model)
    model.save_pretrained(str(tmp_path / "right"))
    write_adapters(saved(tmp_path / "run", model), tmp_path / "out", adapters_of(model))
    check_folder(tmp_path / "out", tmp_path / "right")
    check_folder(tmp_path / "out" / "second", tmp_path / "right" / "second")


@pytest.mark.filterwarnings("ignore")
def test_an_adapter_of_another_checkpoint_is_refused(tmp_path: Path) -> None:
    model = peft.get_peft_model(base(), CONFIGS["lora"]())
    folder = saved(tmp_path / "run", model)
    (adapter,) = adapters_of(model)
    assert write_adapters(folder, tmp_path / "out", [adapter]) == len(adapter.names)
    more = Adapter(adapter.name, {**adapter.names, "base_model.model.lm_head": "x"}, adapter.config)
    with pytest.raises(MismatchError, match=r"\d+ tensors belong to the adapter|no tensor name begins"):
        write_adapters(folder, tmp_path / "out", [Adapter("a", {**more.names, "base_model.model.model.": "y."}, {})])
    assert adapters_of(base()) == []
    assert len(adapters_of(torch.nn.parallel.DataParallel(model))) == 1


@pytest.mark.filterwarnings("ignore")
def test_what_is_no_tensor_of_the_model_is_refused_before_the_first_step(tmp_path: Path) -> None:
    model = peft.get_peft_model(base(), peft.PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM"))
    made = Checkpointer(tmp_path / "run", save_every=1, hf_every=1, signals=())
    with pytest.raises(UnsupportedError, match="peft publishes `prompt_embeddings` of the adapter `default`"):
        made.resume(model=model)
    saved(tmp_path / "run", model)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_trainer_ends_with_a_folder_of_its_adapter(tmp_path: Path) -> None:
    data = [{"input_ids": torch.arange(8), "labels": torch.arange(8)} for _ in range(8)]
    model = peft.get_peft_model(base(), CONFIGS["lora"]())
    arguments = transformers.TrainingArguments(
        str(tmp_path / "out"), max_steps=2, report_to=[], use_cpu=True, save_strategy="no", disable_tqdm=True
    )
    callback = ReshardCallback(tmp_path / "run", save_every=1, hf=tmp_path / "final")
    transformers.Trainer(model, arguments, train_dataset=data, callbacks=[callback]).train()
    model.save_pretrained(str(tmp_path / "right"))
    check_folder(tmp_path / "final", tmp_path / "right")
    assert not (tmp_path / "final" / "model.safetensors").exists()


MERGED: dict[str, tuple[Any, dict[str, Any]]] = {
    "lora": (CONFIGS["lora"], {}),
    "bfloat16": (CONFIGS["lora"], {"dtype": torch.bfloat16}),
    "rslora": (lambda: peft.LoraConfig(r=2, target_modules=["q_proj"], use_rslora=True), {}),
    "dora": (CONFIGS["dora"], {}),
    "embedding of a tied model": (CONFIGS["embedding"], {"tie_word_embeddings": True}),
    "whole head of a tied model": (CONFIGS["whole head"], {"tie_word_embeddings": True}),
    "biases": (CONFIGS["biases"], {}),
    "ia3": (CONFIGS["ia3"], {}),
    "vera": (CONFIGS["vera"], {}),
    "tokens": (lambda: peft.LoraConfig(r=2, target_modules=["q_proj"], trainable_token_indices=[1]), {}),
    "experts": (
        lambda: peft.LoraConfig(r=2, target_parameters=["mlp.experts.gate_up_proj"]),
        {"model_type": "mixtral", "num_local_experts": 2},
    ),
    "two": (CONFIGS["lora"], {}),
}


@pytest.mark.slow(disk=False)
@pytest.mark.parametrize("kind", MERGED)
@pytest.mark.filterwarnings("ignore")
def test_merged_weights_are_those_of_the_library(kind: str, tmp_path: Path) -> None:
    make, options = MERGED[kind]
    sizes: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "vocab_size": 32}
    options = {"model_type": "llama", "num_attention_heads": 2, "num_key_value_heads": 2, **sizes, **options}
    dtype = options.pop("dtype", torch.float32)
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(options.pop("model_type"), **options)
    model = peft.get_peft_model(transformers.AutoModelForCausalLM.from_config(config).to(dtype), make())
    if kind == "two":
        model.add_adapter("second", peft.LoraConfig(r=3, target_modules=["k_proj", "q_proj"]))
        model.base_model.set_adapter(["default", "second"])
    model = moved(model)
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    saved(tmp_path / "run", model, hf_every=1, merge=True)
    assert all(torch.equal(before[key], tensor) for key, tensor in model.state_dict().items())
    folder, right = tmp_path / "run_hf" / "iteration_00000001", tmp_path / "right"
    model.merge_and_unload().save_pretrained(right)
    with reshard.open(folder) as one, reshard.open(right) as two:
        assert sorted(one) == sorted(two)
        for key in one:
            assert (one[key].dtype, one.read(key).tobytes()) == (two[key].dtype, two.read(key).tobytes()), key
    again = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert all(
        torch.equal(tensor, model.get_base_model().state_dict()[key]) for key, tensor in again.state_dict().items()
    )
    assert reshard.verify(folder, loads_in="transformers").ok
    assert [path.name for path in (tmp_path / "run_hf").iterdir() if "merging" in path.name] == []


@pytest.mark.filterwarnings("ignore")
def test_what_cannot_be_merged_is_refused_before_the_first_step(tmp_path: Path) -> None:
    class Int8Linear(torch.nn.Linear):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self.weight = torch.nn.Parameter(self.weight.to(torch.int8), requires_grad=False)

    def tied(**options: Any) -> Any:
        model = base()
        model.config.tie_word_embeddings = True
        model.lm_head.weight = model.model.embed_tokens.weight
        return peft.get_peft_model(model, peft.LoraConfig(r=2, **options))

    quantized = peft.get_peft_model(base(), CONFIGS["lora"]())
    quantized.base_model.model.model.layers[0].self_attn.q_proj.base_layer = Int8Linear(16, 16)
    prompts = peft.get_peft_model(base(), peft.PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM"))
    cases: list[tuple[Any, str]] = [
        (base(), "this is a `LlamaForCausalLM`"),
        (prompts, "adapters of `PromptTuningConfig` cannot be merged"),
        (quantized, "the layer `model.layers.0.self_attn.q_proj` is a `Int8Linear`"),
        (tied(target_modules=["embed_tokens", "lm_head"]), "cannot merge the `LoraConfig`|have adapters and share"),
    ]
    for number, (model, message) in enumerate(cases):
        made = Checkpointer(tmp_path / str(number), save_every=1, hf_every=1, merge=True, signals=())
        with pytest.raises(UnsupportedError, match=message):
            made.resume(model=model)
    with pytest.raises(ArgumentError, match="`merge` belongs to `hf_every`"):
        Checkpointer(tmp_path / "run", merge=True)
    with pytest.raises(ArgumentError, match="`merge` belongs to `hf` or `hf_every`"):
        ReshardCallback(tmp_path / "run", merge=True)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_trainer_ends_with_merged_weights(tmp_path: Path) -> None:
    data = [{"input_ids": torch.arange(8), "labels": torch.arange(8)} for _ in range(8)]
    model = peft.get_peft_model(base(), CONFIGS["lora"]())
    arguments = transformers.TrainingArguments(
        str(tmp_path / "out"), max_steps=2, report_to=[], use_cpu=True, save_strategy="no", disable_tqdm=True
    )
    callback = ReshardCallback(tmp_path / "run", save_every=1, hf=tmp_path / "final.pt", hf_every=2, merge=True)
    transformers.Trainer(model, arguments, train_dataset=data, callbacks=[callback]).train()
    model.merge_and_unload().save_pretrained(tmp_path / "right")
    # A folder whatever its name is.
    for folder in (tmp_path / "final.pt", tmp_path / "run_hf" / "iteration_00000002"):
        with reshard.open(folder) as one, reshard.open(tmp_path / "right") as two:
            assert sorted(one) == sorted(two)
            assert all(one.read(key).tobytes() == two.read(key).tobytes() for key in one)
        assert type(transformers.AutoModelForCausalLM.from_pretrained(folder)).__name__ == "LlamaForCausalLM"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_sharded_models_are_merged(tmp_path: Path) -> None:
    def model_of_peft() -> Any:
        config = peft.LoraConfig(
            r=2, target_modules=["q_proj", "embed_tokens"], modules_to_save=["lm_head"], task_type="CAUSAL_LM"
        )
        return moved(peft.get_peft_model(base(), config))

    def work(_group: TorchGroup) -> str:
        model = model_of_peft()
        mesh = init_device_mesh("cpu", (2,))
        for layer in model.base_model.model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        saved(tmp_path / "run", model, hf_every=1, merge=True)
        return type(model.base_model.model.model.layers[0]).__name__

    with Job(2, work) as job:
        assert job.values() == ["FSDPLlamaDecoderLayer"] * 2
    model_of_peft().merge_and_unload().save_pretrained(tmp_path / "right")
    with (
        reshard.open(tmp_path / "run_hf" / "iteration_00000001") as one,
        reshard.open(tmp_path / "right") as two,
    ):
        assert sorted(one) == sorted(two)
        assert all(one.read(key).tobytes() == two.read(key).tobytes() for key in one)


@pytest.mark.filterwarnings("ignore")
def test_a_save_without_the_base_goes_on_and_publishes_its_adapter(tmp_path: Path) -> None:
    def made() -> Any:
        torch.manual_seed(3)
        return peft.get_peft_model(base(), peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"))

    def train(root: Path, n_steps: int, model: Any, **options: Any) -> int:
        optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=0.1)
        with Checkpointer(root, save_every=1, async_save=False, signals=(), **options) as checkpointer:
            decision = checkpointer.resume(model=model, optimizer=optimizer)
            for step in range(decision.initial_step + 1, n_steps + 1):
                tokens = torch.arange(8)[None] + step
                loss = model(input_ids=tokens, labels=tokens).loss
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                checkpointer.step(step, loss=loss)
        return decision.initial_step

    straight, resumed = made(), made()
    train(tmp_path / "whole", 4, straight)
    train(tmp_path / "run", 2, made(), leave_out_frozen=True, hf_every=1)
    with reshard.open(tmp_path / "run") as checkpoint:
        assert all("lora_" in key for key in checkpoint.keys("model"))
    assert train(tmp_path / "run", 4, resumed, leave_out_frozen=True, hf_every=1) == 2
    expected = straight.state_dict()
    assert all(torch.equal(one, expected[key]) for key, one in resumed.state_dict().items())
    loaded = peft.PeftModel.from_pretrained(base(), tmp_path / "run_hf" / "iteration_00000004").state_dict()
    assert all(torch.equal(one, expected[key]) for key, one in loaded.items())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_trainer_leaves_the_base_out(tmp_path: Path) -> None:
    data = [{"input_ids": torch.arange(8) + n, "labels": torch.arange(8) + n} for n in range(8)]

    def train(n_steps: int, **options: Any) -> Any:
        torch.manual_seed(3)
        model = peft.get_peft_model(base(), peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"))
        arguments = transformers.TrainingArguments(
            str(tmp_path / "out"), max_steps=n_steps, report_to=[], use_cpu=True, save_strategy="no", disable_tqdm=True,
            lr_scheduler_type="constant",
        )  # fmt: skip
        callback = ReshardCallback(tmp_path / "run", save_every=1, leave_out_frozen=True, **options)
        transformers.Trainer(model, arguments, train_dataset=data, callbacks=[callback]).train()
        return model

    train(1)
    model = train(2, hf=tmp_path / "final")
    with reshard.open(tmp_path / "run") as checkpoint:
        assert checkpoint.iteration == 2
        assert all("lora_" in key for key in checkpoint.keys("model"))
    loaded = peft.PeftModel.from_pretrained(base(), tmp_path / "final").state_dict()
    assert all(torch.equal(one, model.state_dict()[key]) for key, one in loaded.items())
    with pytest.raises(ArgumentError, match="`merge` writes whole weights"):
        train(3, hf=tmp_path / "merged", merge=True)
