"""Hugging Face's classifiers with PEFT's adapters: the real libraries, from a configuration, offline."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import sartor
from sartor.model.adapters import adapter_parts
from sartor.model.task import Task


def classifier(attention: str = "sdpa", **adapters: Any) -> Any:
    peft, transformers = (pytest.importorskip(name) for name in ("peft", "transformers"))
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=30, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8,
        max_position_embeddings=8, num_labels=2, attn_implementation=attention,
    )  # fmt: skip
    chosen = peft.LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["query", "value"], **adapters)
    return peft.get_peft_model(transformers.BertForSequenceClassification(config), chosen)


def client(seed: int, n: int = 10) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    ids = torch.randint(1, 30, (n, 5), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, ids[:, 0] % 2


def test_pairs_of_peft_are_found_and_nothing_frozen_is_trained() -> None:
    task = Task(classifier())
    a, b = adapter_parts(task)
    assert (a.size, b.size, task.size) == (2 * 2 * 8, 2 * 8 * 2, 2 * 2 * 8 * 2 + 2 * 8 + 2)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_engines_agree_on_a_classifier_with_a_mask(attention: str, padded: bool) -> None:
    model = classifier(attention, lora_dropout=0.1).double()
    data = {"Oslo": client(0), "Bergen": client(1, 7)}
    for x, _ in data.values():
        x["attention_mask"][:, 3:] = 0 if padded else 1
    options: Any = {"local": {"batch": 4}, "hyper": {"lr": 0.5}, "rounds": 2, "store": False}
    one, other = (
        sartor.run("fedit", model=model, data=data, engine=engine, **options)
        for engine in ("loop", "stacked")
    )
    torch.testing.assert_close(one.w, other.w, rtol=1e-7, atol=1e-9)


def test_a_client_has_its_own_adapter_that_peft_reads(tmp_path: Path) -> None:
    model, data = classifier(), {"Oslo": client(0), "Bergen": client(1)}
    before = {name: value.clone() for name, value in model.state_dict().items()}
    options = {"local": {"batch": 4}, "hyper": {"lr": 0.5}, "rounds": 2, "store": False}
    result = sartor.run("fedsa-lora", model=model, data=data, **options)  # type: ignore[arg-type]
    assert result.summary["bytes_up"] == 2 * 2 * 8 * 2 * 2 * 4  # A alone: two clients, two rounds, four bytes
    own = {name: result.model(client=name) for name in data}
    for made in own.values():
        after = made.state_dict()
        trained = [name for name in after if not torch.equal(after[name], before[name])]
        assert trained
        assert all("lora_" in name or "modules_to_save" in name for name in trained)
    own["Oslo"].save_pretrained(tmp_path / "adapter")
    stored = {path.name for path in (tmp_path / "adapter").iterdir()}
    assert "adapter_model.safetensors" in stored
    from peft import PeftModel

    again = PeftModel.from_pretrained(classifier().unload(), tmp_path / "adapter").eval()
    x = data["Oslo"][0]
    with torch.no_grad():
        torch.testing.assert_close(again(**x).logits, own["Oslo"](**x).logits)
        assert not torch.allclose(own["Bergen"](**x).logits, own["Oslo"](**x).logits)
