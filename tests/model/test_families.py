"""Presets against published totals and published config.json files, none derived from our code."""

import pytest

from llmq_nb.core.errors import UserError
from llmq_nb.model.families import FAMILIES, PRESETS, preset
from llmq_nb.model.parameters import parameter_count

# Parameters that the model pages state (tied heads counted once).
PUBLISHED = {
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "llama-2-7b": 6_738_415_616,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "llama-3.1-8b": 8_030_261_248,
    "mistral-7b-v0.3": 7_248_023_552,
    "smollm2-135m": 134_515_008,
    "smollm2-360m": 361_821_120,
    "smollm2-1.7b": 1_711_376_384,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_preset_has_the_published_number_of_parameters(name: str) -> None:
    assert parameter_count(PRESETS[name]) == PUBLISHED[name]


def test_every_preset_but_the_quickstart_is_a_published_model() -> None:
    assert set(PRESETS) - set(PUBLISHED) == {"quickstart"}


def test_quickstart_holds_1_to_3_million_parameters() -> None:
    # embedding 259*192; a layer: qkv 320*193, out 192*192, gate_up 1024*192, down 192*512, 2 norms
    layer = 320 * 193 + 192 * 192 + 1024 * 192 + 192 * 512 + 2 * 192
    assert parameter_count(PRESETS["quickstart"]) == 259 * 192 + 4 * layer + 192
    assert 1e6 <= parameter_count(PRESETS["quickstart"]) <= 3e6


@pytest.mark.parametrize("name", PRESETS)
def test_biases_and_norms_are_those_of_the_family(name: str) -> None:
    config = PRESETS[name]
    assert config.qkv_bias == (config.family == "qwen2")
    assert config.qk_norm == (config.family == "qwen3")
    assert (config.rope_scaling is not None) == name.startswith("llama-3")
    assert all(0 <= i < config.V for i in (*config.bos_ids, *config.eos_ids))


def test_architectures_are_transformers_class_names() -> None:
    assert {f: facts.architecture for f, facts in FAMILIES.items()} == {
        "qwen2": "Qwen2ForCausalLM",
        "qwen3": "Qwen3ForCausalLM",
        "llama": "LlamaForCausalLM",
        "mistral": "MistralForCausalLM",
    }


def test_preset_ignores_case() -> None:
    assert preset("Qwen2.5-7B") is PRESETS["qwen2.5-7b"]


@pytest.mark.parametrize(
    ("wrong", "near"), [("qwen25-7b", "qwen2.5-7b"), ("llama-3.1-7b", "llama-3.1-8b")]
)
def test_unknown_preset_names_the_nearest(wrong: str, near: str) -> None:
    with pytest.raises(UserError, match=f"'{wrong}': did you mean '{near}'"):
        preset(wrong)


def test_preset_like_no_other_lists_them() -> None:
    with pytest.raises(UserError, match="choose from quickstart, .*smollm2-1.7b"):
        preset("zzz")
