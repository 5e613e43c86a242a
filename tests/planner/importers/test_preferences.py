"""What the keys of other tools for learning from preferences mean here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from planner.errors import UserError
from planner.importers.base import REWARDS
from planner.importers.read import canonical
from planner.job.schema import CANONICAL, Job
from planner.keys.source import read_yaml

START = {
    "axolotl": "base_model: tiny\ndatasets: [{path: pairs.jsonl}]\nlearning_rate: 1e-5\n",
    "LLaMA-Factory": "model_name_or_path: tiny\ndataset: pairs.jsonl\nfinetuning_type: lora\n",
    "TRL": "model_name_or_path: tiny\ndataset_name: pairs.jsonl\n",
    "offmate": "model: tiny\ndataset: pairs.jsonl\n",
}
ALONE = f"{REWARDS} is not supported yet; a file for it cannot be run here"
UNCLEAR = "several trainers of TRL have this key, and no other key says which one is meant; add preference: dpo, hinge"
KEEP_ONE = "is given too, and both mean"


@pytest.fixture
def place(folder: Path) -> Path:
    (folder / "pairs.jsonl").write_text('{"prompt": "a", "chosen": "b", "rejected": "c"}\n')
    (folder / "tiny" / "model.safetensors").touch()
    adapter = {"peft_type": "LORA", "r": 4, "lora_alpha": 12, "lora_dropout": 0.2, "target_modules": ["q_proj"]}
    (folder / "saves").mkdir()
    (folder / "saves" / "adapter_config.json").write_text(json.dumps({**adapter, "bias": "none"}))
    (folder / "saves" / "adapter_model.safetensors").touch()
    return folder


def read(tool: str, lines: str, place: Path) -> tuple[Job, tuple[str, ...]]:
    return Job.parse_with_notes(f"{START[tool]}{lines}\n", place)


@pytest.mark.parametrize(
    ("tool", "lines", "means"),
    [
        ("axolotl", "rl: dpo", {"preference": "dpo", "preference_beta": 0.1, "sft_share": 0.0, "long_rows": "drop"}),
        ("axolotl", "rl: ipo\ndpo_beta: 0.2", {"preference": "ipo", "preference_beta": 0.2}),
        ("axolotl", "rl: dpo\ntrl: {beta: 0.3}", {"preference": "dpo", "preference_beta": 0.3}),
        ("axolotl", "rl: dpo\ndpo_loss_type: [hinge]", {"preference": "hinge", "sft_share": 0.0}),
        ("axolotl", "rl: dpo\ndpo_loss_type: [sigmoid, sft]", {"preference": "dpo", "sft_share": 1.0}),
        (
            "axolotl",
            "rl: dpo\ndpo_loss_type: [ipo, sft]\ndpo_loss_weights: [1, 0.2]",
            {"preference": "ipo", "sft_share": 0.2, "loss_weighting": "tokens"},
        ),
        (
            "axolotl",
            "rl: dpo\ndpo_loss_type: [robust]\ndpo_label_smoothing: 0.1",
            {"preference": "robust", "preference_smoothing": 0.1},
        ),
        ("axolotl", "rl: orpo\norpo_alpha: 0.2", {"preference_beta": 0.2, "sft_share": 1.0, "sft_on_prompt": True}),
        ("axolotl", "rl: orpo\nsft_weight: 0", {"sft_share": 0.0, "sft_on_prompt": False}),
        ("axolotl", "rl: simpo\nsimpo_gamma: 1.0", {"preference": "simpo", "simpo_gamma": 1.0, "sft_share": 1.0}),
        ("axolotl", "rl: simpo\nsimpo_gamma: 1.0\ncpo_alpha: 0", {"preference": "simpo", "sft_share": 0.0}),
        (
            "axolotl",
            "rl: kto\nmicro_batch_size: 2\nkto_desirable_weight: 0.2\nkto_undesirable_weight: 0",
            {"preference": "kto", "desirable_weight": 0.2, "undesirable_weight": 1.0},
        ),
        ("axolotl", "rl: dpo\nexcess_length_strategy: raise", {"long_rows": "refuse"}),
        ("axolotl", "rl: dpo\nsft_weight: 0.3", {"sft_share": 0.3}),
        ("axolotl", "rl: dpo\npreference: dpo", {"preference": "dpo"}),
        ("axolotl", "rl:", {"preference": None}),
        (
            "axolotl",
            "reward_model: true\nneftune_noise_alpha: 5\nspecial_tokens: {pad_token: <pad>, eos_token: <eos>}",
            {
                "preference": "reward",
                "long_rows": "refuse",
                "neftune_noise_alpha": 5.0,
                "router_aux_loss_mean": False,
                "special_tokens": {"pad_token": "<pad>", "eos_token": "<eos>"},
            },
        ),
        (
            "axolotl",
            "reward_model: true\nnum_labels: 1\ncenter_rewards_coefficient: 0.01",
            {"center_rewards_coefficient": 0.01},
        ),
        ("axolotl", "reward_model: false", {"preference": None}),
        ("axolotl", "special_tokens: {pad_token: <pad>, eos_token: <eos>}", {"special_tokens": {"eos_token": "<eos>"}}),
        ("LLaMA-Factory", "stage: rm\npreference: reward", {"preference": "reward", "long_rows": "drop"}),
        (
            "TRL",
            "center_rewards_coefficient: 0.01\ndisable_dropout: true",
            {"preference": "reward", "center_rewards_coefficient": 0.01, "learning_rate": 1e-4, "long_rows": "drop"},
        ),
        ("TRL", "use_peft: true\nlora_task_type: SEQ_CLS", {"preference": "reward", "method": "lora", "lora_r": 16}),
        ("offmate", "preference: reward\nspecial_tokens: {pad_token: x}", {"special_tokens": {"pad_token": "x"}}),
        (
            "LLaMA-Factory",
            "stage: dpo",
            {"preference": "dpo", "preference_beta": 0.1, "loss_weighting": "tokens", "router_aux_loss_coef": 0},
        ),
        (
            "LLaMA-Factory",
            "stage: dpo\npref_loss: sigmoid\ndpo_label_smoothing: 0.1",
            {"preference": "dpo", "preference_smoothing": 0.1},
        ),
        ("LLaMA-Factory", "stage: dpo\npref_ftx: 0.5", {"sft_share": 0.5, "loss_weighting": "documents"}),
        ("LLaMA-Factory", "stage: dpo\npref_ftx: -1", {"sft_share": 0.0}),
        (
            "LLaMA-Factory",
            "stage: dpo\npref_loss: orpo\npref_ftx: 0.5",
            {"preference": "orpo", "sft_share": 1.5, "sft_on_prompt": False, "loss_weighting": "documents"},
        ),
        (
            "LLaMA-Factory",
            "stage: dpo\npref_loss: simpo\nsimpo_gamma: 1.0",
            {"preference": "simpo", "simpo_gamma": 1.0, "sft_share": 0.0},
        ),
        (
            "LLaMA-Factory",
            "stage: kto\nkto_chosen_weight: 2.0\nkto_rejected_weight: 0.5",
            {"preference": "kto", "desirable_weight": 2.0, "undesirable_weight": 0.5},
        ),
        ("LLaMA-Factory", "stage: dpo\nld_alpha: 1.0\npref_bco_weight: 0.0", {"preference": "dpo"}),
        (
            "TRL",
            "loss_type: sigmoid\nbeta: 0.2",
            {"preference": "dpo", "preference_beta": 0.2, "train_on": "completions"},
        ),
        ("TRL", "loss_type: [hinge, sft]\nloss_weights: [1.0, 0.5]", {"preference": "hinge", "sft_share": 0.5}),
        ("TRL", "f_divergence_type: reverse_kl", {"preference": "dpo", "learning_rate": 1e-6}),
        ("TRL", "loss_type: robust\nlabel_smoothing: 0.1", {"preference": "robust", "preference_smoothing": 0.1}),
        ("TRL", "undesirable_weight: 1.5", {"preference": "kto", "undesirable_weight": 1.5}),
        ("TRL", "loss_type: kto", {"preference": "kto"}),
        ("TRL", "cpo_alpha: 0.5\nlabel_smoothing: 0.1", {"preference": "cpo", "sft_share": 0.5}),
        ("TRL", "loss_type: simpo", {"preference": "simpo", "sft_share": 1.0, "simpo_gamma": 0.5}),
        ("TRL", "preference: orpo\nbeta: 0.2", {"preference_beta": 0.2, "sft_on_prompt": True, "sft_share": 1.0}),
        ("TRL", "preference: dpo\nbeta: 0.2", {"preference": "dpo", "router_aux_loss_coef": "auto"}),
        ("TRL", "loss_type: nll", {"preference": None, "train_on": "pairs"}),
        ("offmate", "preference: dpo\nbeta: 0.2\nrl: false\nstage: null", {"preference_beta": 0.2}),
    ],
)
def test_a_file_asks_for_the_loss_that_the_tool_computes(
    tool: str, lines: str, means: dict[str, object], place: Path
) -> None:
    job, _ = read(tool, lines, place)
    assert {key: getattr(job, key) for key in means} == means


@pytest.mark.parametrize(
    ("tool", "lines", "told"),
    [
        *(("axolotl", f"rl: {rl}", f'rl: it is "{rl}"; {ALONE}') for rl in ("grpo", "gdpo", "ebft", "nca")),
        ("axolotl", "process_reward_model: true", f"process_reward_model: {ALONE}"),
        ("axolotl", "reward_model: true\nrl: dpo", "reward_model: rl is given too, and both say what is learned"),
        ("axolotl", "reward_model: 1.0", "reward_model: it is 1.0; it must be true or false"),
        ("axolotl", "reward_model: true\nnum_labels: 2", "reward_model: num_labels is 2; a reward model has 1"),
        (
            "axolotl",
            "reward_model: true\nexcess_length_strategy: truncate",
            "excess_length_strategy: it cannot be used with preference: reward",
        ),
        (
            "axolotl",
            "reward_model: true\ngroup_by_length: true",
            "group_by_length: it cannot be used with preference: pairs have two lengths",
        ),
        ("axolotl", "rl: dpo\ndpo_loss_type: [exo_pair]", f'dpo_loss_type: it is ["exo_pair"]; {ALONE}'),
        ("axolotl", "rl: dpo\ndpo_loss_type: [sigmoid, hinge]", f'dpo_loss_type: it is ["sigmoid", "hinge"]; {ALONE}'),
        (
            "axolotl",
            "rl: dpo\ndpo_loss_type: [sigmoid, sft]\ndpo_loss_weights: [0.5, 0.5]",
            "dpo_loss_weights: it is [0.5, 0.5]; only the weight of sft may be another than 1",
        ),
        (
            "axolotl",
            "rl: dpo\ndpo_loss_type: [sigmoid, sft]\ndpo_loss_weights: [1]",
            'dpo_loss_weights: it is [1]; it must have one number for each loss in ["sigmoid", "sft"]',
        ),
        (
            "axolotl",
            "rl: dpo\ndpo_loss_type: [sigmoid, sft]\nsft_weight: 0.5",
            "dpo_loss_type: sft_weight is given too, and both mean the weight of sft; keep one",
        ),
        (
            "axolotl",
            "rl: ipo\ndpo_loss_type: [hinge]",
            'dpo_loss_type: it is ["hinge"]; it is for rl: dpo, as in axolotl',
        ),
        (
            "axolotl",
            "rl: dpo\ndpo_label_smoothing: 0.1",
            "dpo_label_smoothing: it is 0.1; TRL ignores it with the loss",
        ),
        ("axolotl", "rl: simpo", "simpo_gamma: it is missing; axolotl has no default for it"),
        ("axolotl", "rl: dpo\nrpo_alpha: 1.0", "rpo_alpha: a loss on chosen answers by TRL's key of earlier versions"),
        ("axolotl", "rl: dpo\ndpo_use_weighting: true", "dpo_use_weighting: another loss is not supported yet"),
        ("axolotl", "rl: dpo\nrl_beta: 0.1\norpo_alpha: 0.2", f"orpo_alpha: rl_beta {KEEP_ONE} preference_beta"),
        ("axolotl", "rl: dpo\npreference: kto", f"preference: rl {KEEP_ONE} preference"),
        ("axolotl", "rl: dpo\nsample_packing: true", "sample_packing: it cannot be used with preference"),
        ("axolotl", "rl: dpo\nrl_beta: 0", "rl_beta: it is 0; it must be a number above 0"),
        ("axolotl", "rl: dpo\ntrl: 3", "trl: it is 3; it must be a mapping"),
        (
            "axolotl",
            "rl: dpo\nadapter: lora\nlora_model_dir: saves",
            "lora_model_dir: with rl: dpo axolotl begins new adapters and does not read these; leave this key out",
        ),
        *(("LLaMA-Factory", f"stage: {stage}", f'stage: it is "{stage}"; {ALONE}') for stage in ("ppo",)),
        (
            "LLaMA-Factory",
            "stage: rm",
            'stage: it is "rm"; its head is another than transformers\' classifiers have, with dropout before it; that '
            "is not supported yet; add preference: reward to train one of these, without dropout",
        ),
        ("LLaMA-Factory", "stage: rm\npreference: dpo", 'stage: it is "rm"; its head is another than transformers\''),
        (
            "LLaMA-Factory",
            "stage: dpo\npreference: reward",
            'stage: it is "dpo", and preference is "reward"; keep one of them',
        ),
        ("LLaMA-Factory", "reward_model: saves", f"reward_model: {ALONE}"),
        (
            "TRL",
            "center_rewards_coefficient: 0.01\nuse_peft: true",
            "use_peft: TRL's default lora_task_type is CAUSAL_LM, with which peft does not train the head of a reward "
            "model; add lora_task_type: SEQ_CLS",
        ),
        (
            "TRL",
            "center_rewards_coefficient: 0.01\nuse_peft: true\nlora_task_type: CAUSAL_LM",
            'lora_task_type: it is "CAUSAL_LM", with which peft does not train the head of a reward model; give',
        ),
        (
            "TRL",
            "center_rewards_coefficient: 0.01\npad_token: x",
            'pad_token: the reward is that of the last token before it; give special_tokens: {pad_token: "x"} in its',
        ),
        ("TRL", "center_rewards_coefficient: 0.01\ndisable_dropout: false", "disable_dropout: it is false; dropout"),
        ("TRL", "loss_type: nll\nlora_task_type: SEQ_CLS", "lora_task_type: another kind of LoRA is not supported"),
        ("TRL", "disable_dropout: true", f"disable_dropout: {UNCLEAR}"),
        ("LLaMA-Factory", "stage: dpo\npref_loss: kto_pair", f'pref_loss: it is "kto_pair"; {ALONE}'),
        ("LLaMA-Factory", "stage: dpo\nld_alpha: 0", "ld_alpha: another weight for the longer answer's end (LD-DPO)"),
        ("LLaMA-Factory", "stage: dpo\npref_bco_weight: 1", "pref_bco_weight: a second loss of preferences beside the"),
        ("LLaMA-Factory", "stage: kto\npref_ftx: 0.5", "pref_ftx: a loss on chosen answers beside that of stage: kto"),
        (
            "LLaMA-Factory",
            "stage: dpo\nref_model: tiny\nref_model_adapters: saves",
            "ref_model_adapters: adapters for ref_model is not supported yet; merge them, and give the merged model as",
        ),
        (
            "LLaMA-Factory",
            "stage: dpo\nref_model: tiny\nref_model_quantization_bit: 4",
            "ref_model_quantization_bit: a quantized ref_model is not supported yet",
        ),
        (
            "LLaMA-Factory",
            "stage: dpo\nadapter_name_or_path: saves\nquantization_bit: 4",
            "adapter_name_or_path: LLaMA-Factory compares with the quantized model without it, which is not supported",
        ),
        ("LLaMA-Factory", "stage: dpo\ntrain_on_prompt: true", "train_on_prompt: it cannot be used with"),
        (
            "LLaMA-Factory",
            "stage: kto\npreference: dpo",
            'stage: it is "kto", and preference is "dpo"; keep one of them',
        ),
        ("TRL", "beta: 0.1\nlabel_smoothing: 0.1\nprecompute_ref_log_probs: true", f"beta: {UNCLEAR}"),
        ("TRL", "precompute_ref_log_probs: true", f"precompute_ref_log_probs: {UNCLEAR}"),
        ("TRL", "beta: 0.04\nnum_generations: 8", f"num_generations: {ALONE}"),
        *(
            ("TRL", f"loss_type: {loss}\nbeta: 0.1", f'loss_type: it is "{loss}"; {ALONE}')
            for loss in ("nca_pair", "dapo")
        ),
        ("TRL", "cpo_alpha: 1.0\nloss_type: hinge", f'loss_type: it is "hinge"; {ALONE}'),
        ("TRL", "loss_type: dft", "loss_type: another loss is not supported yet; leave this key out"),
        ("TRL", "loss_type: sigmoid\nlabel_smoothing: 0.1", "label_smoothing: it is 0.1; TRL ignores it with the loss"),
        ("TRL", "loss_type: robust", "robust needs preference_smoothing above 0"),
        (
            "TRL",
            "loss_type: hinge\npreference: dpo",
            'loss_type: it is "hinge", and preference is dpo; keep one of them',
        ),
        ("TRL", "f_divergence_type: js_divergence", "f_divergence_type: another loss is not supported yet"),
        ("TRL", "loss_type: sigmoid\nsync_ref_model: true", "sync_ref_model: another reference is not supported yet"),
        ("TRL", "loss_type: sigmoid\nref_model_init_kwargs: {a: 1}", "ref_model_init_kwargs: another reference"),
        ("TRL", "loss_type: sigmoid\ndisable_dropout: false", "disable_dropout: it is false; dropout"),
        ("TRL", "loss_type: sigmoid\nmax_prompt_length: 9", "max_prompt_length: cutting prompts or answers apart from"),
        ("TRL", "loss_type: sigmoid\nmax_length: null", "max_length: it is null, and TRL then cuts no row"),
        ("TRL", "rl: dpo", "rl: unknown key; did you mean preference?"),
        ("offmate", "rl: dpo", "rl: unknown key; did you mean preference?"),
        ("offmate", "pref_loss: orpo", "pref_loss: unknown key; did you mean preference?"),
        ("offmate", "preference: dpo\npref_ftx: 0.5", "pref_ftx: unknown key; did you mean sft_weight?"),
        (
            "offmate",
            "stage: dpo",
            'stage: it is "dpo", which is LLaMA-Factory\'s word; give preference: dpo in its place',
        ),
        ("offmate", "label_smoothing: 0.1", "label_smoothing: unknown key; did you mean label_smoothing_factor?"),
        ("offmate", "reward_model: true", "reward_model: unknown key; did you mean preference?"),
        ("offmate", "stage: rm", 'stage: it is "rm", which is LLaMA-Factory\'s word; give preference: reward in its'),
        ("offmate", "beta: 0.2", "beta: it is for preference; give that too, or leave it out"),
        ("offmate", "loss_type: sigmoid", "loss_type: it is a key of TRL's; give preference: dpo in its place"),
    ],
)
def test_what_the_losses_are_not_is_refused_in_one_line(tool: str, lines: str, told: str, place: Path) -> None:
    with pytest.raises(UserError) as refused:
        read(tool, lines, place)
    (line,) = refused.value.numbers
    assert line.partition(": ")[2].startswith(told) or line.startswith(told), line


@pytest.mark.parametrize(
    ("tool", "lines", "note"),
    [
        ("axolotl", "rl_beta: 0.1\ntrl: {beta: 1}", "not used: rl_beta, trl (it has no effect without rl)"),
        ("axolotl", "rl: dpo\ncpo_alpha: 1\nsimpo_gamma: 1", "not used: cpo_alpha, simpo_gamma (it has no effect with"),
        (
            "axolotl",
            "rl: ipo\ndpo_label_smoothing: 0.1",
            "not used: dpo_label_smoothing (it has no effect with preference:",
        ),
        (
            "axolotl",
            "rl: simpo\nsimpo_gamma: 1\ndpo_label_smoothing: 0.1",
            "not used: dpo_label_smoothing (axolotl uses it with rl: dpo alone)",
        ),
        (
            "axolotl",
            "rl: dpo\ntrain_on_inputs: true\nneftune_noise_alpha: 5\ngroup_by_length: true\nmin_sample_len: 9",
            "not used: train_on_inputs, neftune_noise_alpha, group_by_length, min_sample_len (axolotl does not use it",
        ),
        (
            "axolotl",
            "reward_model: true\ntrain_on_inputs: true\nmin_sample_len: 9",
            "not used: train_on_inputs, min_sample_len (axolotl does not use it with rl or reward_model)",
        ),
        ("axolotl", "reward_model: true\ntrl: {beta: 1}", "not used: trl (it has no effect without rl)"),
        (
            "axolotl",
            "reward_model: true\nexcess_length_strategy: drop",
            "in this file of axolotl's: pairs longer than max_length are left out, which axolotl cuts at their end",
        ),
        (
            "axolotl",
            "center_rewards_coefficient: 0.1",
            "not used: center_rewards_coefficient (it has no effect without preference: reward)",
        ),
        (
            "LLaMA-Factory",
            "stage: rm\npreference: reward",
            "in this file of LLaMA-Factory's: the reward model is a classifier of transformers, trained without",
        ),
        (
            "axolotl",
            "rl: dpo\ntrl: {beta: 1, use_vllm: false}",
            "not used: use_vllm in trl (it has no effect with preferences)",
        ),
        ("LLaMA-Factory", "pref_beta: 0.1", "not used: pref_beta (it has no effect without stage: dpo or stage: kto)"),
        ("LLaMA-Factory", "stage: kto\npref_loss: orpo", "not used: pref_loss (it has no effect without stage: dpo)"),
        ("LLaMA-Factory", "stage: dpo\nppo_epochs: 4", "not used: ppo_epochs (it has no effect without stage: ppo)"),
        (
            "LLaMA-Factory",
            "stage: dpo\npref_loss: orpo\nref_model: gone",
            "not used: ref_model (it has no effect with preference: orpo)",
        ),
        (
            "LLaMA-Factory",
            "stage: dpo\nmoe_aux_loss_coef: 0.1",
            "not used: moe_aux_loss_coef (LLaMA-Factory adds no loss of routers to one of preferences)",
        ),
        (
            "LLaMA-Factory",
            "stage: dpo",
            "in this file of LLaMA-Factory's: long rows are cut at their end; LLaMA-Factory cuts prompt and answer in",
        ),
        (
            "LLaMA-Factory",
            "stage: kto",
            "in this file of LLaMA-Factory's: long rows are cut at their end; LLaMA-Factory cuts prompt and answer in "
            "proportion; the answers that estimate KTO's divergence are those of the micro-batch's prompts",
        ),
        (
            "TRL",
            "loss_type: kto\ntrain_sampling_strategy: sequential",
            "not used: train_sampling_strategy (rows come in a random order)",
        ),
        ("TRL", "loss_type: kto", "in this file of TRL's: rows come in a random order, under seed"),
        (
            "TRL",
            "loss_type: sigmoid\nprecompute_ref_log_probs: true",
            "not used: precompute_ref_log_probs (the reference's log-probabilities are always computed before",
        ),
        (
            "TRL",
            "loss_type: ipo\nassistant_only_loss: true",
            "not used: assistant_only_loss (TRL scores the answers alone)",
        ),
    ],
)
def test_what_a_loss_does_not_use_is_said(tool: str, lines: str, note: str, place: Path) -> None:
    job, notes = read(tool, lines, place)
    assert [one for one in notes if one.startswith(note)], notes
    assert (job.train_on == "completions") == (job.preference is not None or tool != "TRL")


def test_an_adapter_that_goes_on_is_compared_with_the_model_without_it_as_in_llama_factory(place: Path) -> None:
    job, notes = read("LLaMA-Factory", "stage: dpo\nadapter_name_or_path: saves", place)
    assert job.ref_model == job.model == str(place / "tiny")
    assert [note for note in notes if note.endswith("the reference is the model without the adapter, as there")]
    assert read("LLaMA-Factory", "stage: dpo\npref_loss: orpo\nadapter_name_or_path: saves", place)[0].ref_model is None


def test_a_key_of_offmates_own_does_not_show_another_tool(place: Path) -> None:
    job, notes = read("TRL", "loss_type: sigmoid\nref_model: tiny", place)
    assert (job.ref_model, job.learning_rate) == (str(place / "tiny"), 1e-6), notes


def test_the_defaults_are_those_of_trls_own_configs(place: Path, tmp_path: Path) -> None:
    from trl.experimental.cpo import CPOConfig
    from trl.experimental.orpo import ORPOConfig
    from trl.trainer.dpo_config import DPOConfig
    from trl.trainer.kto_config import KTOConfig
    from trl.trainer.reward_config import RewardConfig

    names = {
        "beta": "preference_beta",
        "learning_rate": "learning_rate",
        "max_length": "max_length",
        "cpo_alpha": "sft_share",
        "simpo_gamma": "simpo_gamma",
        "label_smoothing": "preference_smoothing",
        "desirable_weight": "desirable_weight",
        "undesirable_weight": "undesirable_weight",
        "center_rewards_coefficient": "center_rewards_coefficient",
    }
    for loss, kind in {
        "dpo": DPOConfig,
        "kto": KTOConfig,
        "cpo": CPOConfig,
        "simpo": CPOConfig,
        "orpo": ORPOConfig,
        "reward": RewardConfig,
    }.items():
        config: Any = kind(output_dir=str(tmp_path / "out"), bf16=False, report_to="none", use_cpu=True)
        job, _ = read("TRL", f"preference: {loss}", place)
        there = {theirs: getattr(config, theirs) for theirs in names if hasattr(config, theirs)}
        assert len(there) >= 3 and {theirs: getattr(job, names[theirs]) for theirs in there} == there
        assert config.disable_dropout and getattr(config, "truncation_mode", "keep_start") == "keep_start"


# ---- the keys of the tools' own examples

_AXOLOTL = """
base_model: NousResearch/Meta-Llama-3-8B
load_in_8bit: true
load_in_4bit: false
chat_template: llama3
datasets:
  - path: fozziethebeat/alpaca_messages_2k_dpo_test
    type: chat_template.default
    field_messages: conversation
    field_chosen: chosen
    field_rejected: rejected
val_set_size: 0.05
output_dir: ./outputs/lora-out
sequence_len: 4096
sample_packing: false
adapter: lora
lora_model_dir:
lora_r: 32
lora_alpha: 16
lora_dropout: 0.05
lora_target_linear: true
gradient_accumulation_steps: 4
micro_batch_size: 2
num_epochs: 4
optimizer: adamw_bnb_8bit
lr_scheduler: cosine
learning_rate: 0.0002
bf16: auto
tf32: false
gradient_checkpointing: true
attn_implementation: flash_attention_2
warmup_ratio: 0.1
evals_per_epoch: 4
saves_per_epoch: 1
weight_decay: 0.0
"""
_LLAMA_FACTORY = """
model_name_or_path: Qwen/Qwen3-4B-Instruct-2507
trust_remote_code: true
do_train: true
finetuning_type: lora
lora_rank: 8
lora_target: all
dataset: dpo_en_demo
template: qwen3_nothink
cutoff_len: 2048
max_samples: 1000
preprocessing_num_workers: 16
output_dir: saves/qwen3-4b/lora/dpo
plot_loss: true
overwrite_output_dir: true
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
learning_rate: 5.0e-6
num_train_epochs: 3.0
lr_scheduler_type: cosine
warmup_ratio: 0.1
bf16: true
ddp_timeout: 180000000
resume_from_checkpoint: null
"""
_DPO = "rl: dpo\n"
_KTO = "rl: kto\nrl_beta: 0.5\nkto_desirable_weight: 0.2\nremove_unused_columns: false\neval_sample_packing: false\n"
_SWANLAB = "plugins: [axolotl.integrations.swanlab.SwanLabPlugin]\nuse_swanlab: true\nswanlab_mode: cloud\n"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (_AXOLOTL + _DPO, "dpo"),
        (_AXOLOTL + _DPO + "special_tokens: {bos_token: <|im_start|>, eos_token: <|im_end|>}\n", "dpo"),
        (_AXOLOTL + _DPO + _SWANLAB + "swanlab_log_completions: true\nswanlab_completion_log_interval: 100\n", "dpo"),
        (_AXOLOTL + _KTO, "kto"),
        (_AXOLOTL + "rl: orpo\norpo_alpha: 0.1\nremove_unused_columns: false\nloss_watchdog_threshold: 5.0\n", "orpo"),
        (_AXOLOTL + _DPO + "use_onebitllms: true\nuse_kernels: false\n", "line 37: use_onebitllms: a base quantized"),
        (_AXOLOTL + "rl: gdpo\ntrl: {num_generations: 8}\n", 'line 36: rl: it is "gdpo"; this kind of training'),
        (_AXOLOTL + "rl: ebft\nebft: {alpha: 1.0}\n", 'line 36: rl: it is "ebft"; this kind of training'),
        (_AXOLOTL + "reward_model: true\nnum_labels: 1\nmodel_type: AutoModelForSequenceClassification\n", "reward"),
        (_AXOLOTL + "process_reward_model: true\n", "line 36: process_reward_model: this kind of training"),
        (_LLAMA_FACTORY + "stage: dpo\npref_beta: 0.1\npref_loss: sigmoid\n", "dpo"),
        (_LLAMA_FACTORY + "stage: dpo\npref_beta: 0.1\npref_loss: orpo\n", "orpo"),
        (_LLAMA_FACTORY + "stage: dpo\npref_beta: 0.1\npref_loss: simpo\n", "simpo"),
        (_LLAMA_FACTORY + "stage: kto\npref_beta: 0.1\n", "kto"),
        (_LLAMA_FACTORY + "stage: rm\n", 'line 25: stage: it is "rm"; its head is another than transformers'),
        (
            _LLAMA_FACTORY + "stage: ppo\nreward_model: saves/reward\n",
            'line 25: stage: it is "ppo"; this kind of training',
        ),
    ],
)
def test_the_keys_of_the_tools_examples_are_read(text: str, told: str) -> None:
    try:
        values, mistakes, _ = canonical(read_yaml(text, "job.yaml"), CANONICAL)
    except UserError as error:
        (line,) = error.numbers
    else:
        line = str(mistakes[0]) if mistakes else values["preference"]
        assert len(mistakes) <= 1
    assert line.startswith(told), line
