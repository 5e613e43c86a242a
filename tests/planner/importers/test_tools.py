"""Files of axolotl, LLaMA-Factory and TRL: what they leave out means what it means there, and a note says so."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from planner.errors import UserError
from planner.importers.axolotl_templates import TEMPLATES
from planner.importers.templates import named_template
from planner.job.imported import imported
from planner.job.schema import Job
from planner.models.tokenizer import load_tokenizer
from tests.support.texts import tiny_llama_folder, write_jsonl

AXOLOTL = "base_model: model\ndatasets: [{path: text.jsonl, type: alpaca}]\nlearning_rate: 0.0002\n"
LLAMA_FACTORY = "model_name_or_path: model\nstage: sft\ndataset: text.jsonl\ncutoff_len: 2048\n"
OURS = "model: model\ndataset: text.jsonl\n"
TRL = "model_name_or_path: model\ndataset_name: text.jsonl\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny_llama_folder(tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").touch()
    write_jsonl(tmp_path / "text.jsonl", [{"instruction": "a", "output": "b"}])
    return tmp_path


def note(text: str, folder: Path) -> str:
    return next(line for line in Job.parse_with_notes(text, folder)[1] if line.startswith("the file reads as"))


def test_qlora_is_a_method_only_where_a_method_stands(folder: Path) -> None:
    job = Job.parse(OURS + "method: qlora\nload_in_4bit: true\nrun_name: qlora\noutput_dir: qlora\n", folder)
    assert (job.method, job.run_name, Path(job.output_dir or "").name) == ("lora", "qlora", "qlora")


def test_alpaca_is_another_template_in_each_tool(folder: Path) -> None:
    assert Job.parse(LLAMA_FACTORY + "template: alpaca\n", folder).chat_template == "llama_factory:alpaca"
    begun = "Below is an instruction that describes a task."
    assert begun not in (Job.parse(AXOLOTL + "chat_template: alpaca\n", folder).chat_template or begun)


@pytest.mark.parametrize("name", [*TEMPLATES, "qwen3_5", "gemma3"])
def test_a_named_template_of_axolotls_is_taken_as_it_is_there_and_not_the_tokenizers_own(
    name: str, folder: Path
) -> None:
    job, notes = Job.parse_with_notes(AXOLOTL + f"chat_template: {name}\n", folder)
    of_entry = Job.parse(AXOLOTL.replace("type: alpaca", f"type: chat_template, chat_template: {name}"), folder)
    assert job.chat_template == of_entry.chat_template == named_template(name) is not None
    assert not any("tokenizer's own" in told for told in notes)


@pytest.mark.parametrize("name", ["command_a_rag", "llama3_2_vision", "pixtral"])
def test_a_template_of_axolotls_that_is_not_there_is_refused_by_its_name(name: str, folder: Path) -> None:
    with pytest.raises(UserError) as refused:
        Job.parse(AXOLOTL + f"chat_template: {name}\n", folder)
    (line,) = refused.value.numbers
    assert f"/{name}, nor a template of that name (known: chatml," in line and "phi_35" in line


def test_axolotls_absent_keys_mean_what_they_mean_there(folder: Path) -> None:
    job = Job.parse(AXOLOTL, folder)
    assert (job.max_length, job.num_train_epochs, job.per_device_train_batch_size) == (512, 1, 1)
    assert (job.lr_scheduler_type, job.warmup_steps, job.bf16, job.method) == ("cosine", 0.03, True, "full")
    assert note(AXOLOTL, folder) == (
        "the file reads as axolotl's; its defaults for keys that are not given: max_length 512, num_train_epochs 1, "
        "per_device_train_batch_size 1, lr_scheduler_type cosine, warmup_steps 0.03, bf16 auto, long_rows drop"
    )


def test_axolotls_tokens_as_a_mapping_are_special_tokens_as_in_its_first_files(folder: Path) -> None:
    tokens = "tokens: {pad_token: <pad>, bos_token: <new>, eos_token: <|im_end|>}\n"
    job, notes = Job.parse_with_notes(AXOLOTL + tokens, folder)
    assert job.special_tokens == {"bos_token": "<new>", "eos_token": "<|im_end|>"}
    assert job.add_tokens == ("<new>", "<|im_end|>"), "what is not there is added, as its special_tokens are"
    tokenizer = load_tokenizer(job)
    assert (tokenizer.bos_token, tokenizer.eos_token, len(tokenizer)) == ("<new>", "<|im_end|>", 261)
    assert "in offmate's names: base_model is model, datasets is dataset, tokens is special_tokens" in notes
    assert "not used: pad_token (padding is never learned, and keeps its token)" in notes
    listed = Job.parse(AXOLOTL + "tokens: [<a>, <b>]\n", folder)
    assert (listed.add_tokens, listed.special_tokens) == (("<a>", "<b>"), None)
    with pytest.raises(UserError, match="is given too, and both mean special_tokens"):
        Job.parse(AXOLOTL + tokens + "special_tokens: {eos_token: <eos>}\n", folder)


def test_axolotls_adapters_want_rank_alpha_and_targets(folder: Path) -> None:
    with pytest.raises(UserError) as refused:
        Job.parse(AXOLOTL + "adapter: lora\nlora_r: 8\n", folder)
    assert refused.value.numbers == (
        "lora_alpha: it is missing; axolotl has no default for it",
        "lora_target_modules: it is missing; axolotl has no default for it",
    )
    job = Job.parse(AXOLOTL + "adapter: lora\nlora_r: 8\nlora_alpha: 16\nlora_target_linear: true\n", folder)
    assert (job.lora_r, job.lora_alpha, job.lora_dropout, job.lora_target_modules) == (8, 16.0, 0.0, "all-linear")


def test_llama_factorys_rank_alone_means_an_alpha_of_twice_as_much_and_no_dropout(folder: Path) -> None:
    job = Job.parse(LLAMA_FACTORY + "finetuning_type: lora\nlora_rank: 8\nlora_target: all\n", folder)
    assert (job.lora_r, job.lora_alpha, job.lora_dropout, job.lora_target_modules) == (8, 16.0, 0.0, "all-linear")
    assert (job.max_length, job.bf16, job.per_device_train_batch_size) == (2048, False, 8)


def test_llama_factory_trains_adapters_where_nothing_else_is_said(folder: Path) -> None:
    assert Job.parse(LLAMA_FACTORY, folder).method == "lora"
    assert Job.parse(LLAMA_FACTORY + "finetuning_type: full\n", folder).method == "full"


def test_trl_learns_all_of_a_conversation_and_of_pairs_the_completion(folder: Path) -> None:
    job = Job.parse(TRL, folder)
    assert (job.learning_rate, job.bf16, job.train_on) == (2e-5, True, "pairs")
    for lines, train_on in (
        ("assistant_only_loss: true", "answers"),
        ("completion_only_loss: false", "all"),
        ("completion_only_loss: true", "pairs"),
        ("assistant_only_loss: false\ncompletion_only_loss: null", "pairs"),
        ("assistant_only_loss: true\ncompletion_only_loss: true", "answers"),
        ("assistant_only_loss: true\ncompletion_only_loss: null", "answers"),
        ("assistant_only_loss: true\ncompletion_only_loss: false", "all_answers"),
        ("assistant_only_loss: false\ncompletion_only_loss: false", "all"),
    ):
        assert Job.parse(f"{TRL}{lines}\n", folder).train_on == train_on


def test_what_a_file_says_is_not_touched(folder: Path) -> None:
    given = "sequence_len: 64\nnum_epochs: 2\nmicro_batch_size: 3\nlr_scheduler: linear\nwarmup_steps: 0\nbf16: false\n"
    given += "excess_length_strategy: truncate\n"
    job, notes = Job.parse_with_notes(AXOLOTL + given, folder)
    assert (job.max_length, job.num_train_epochs, job.slice_rows, job.warmup_steps, job.bf16) == (64, 2, 3, 0, False)
    assert not any(line.startswith("the file reads as") for line in notes)


def test_offmates_own_files_keep_offmates_defaults(folder: Path) -> None:
    job, notes = Job.parse_with_notes("model: model\ndataset: text.jsonl\n", folder)
    assert (job.learning_rate, job.max_length, job.bf16, job.train_on) == (5e-5, 1024, False, "completions")
    assert not any("reads as" in line for line in notes)


def test_a_resolved_file_reads_back_equal_whosever_it_was(folder: Path) -> None:
    for text in (AXOLOTL, LLAMA_FACTORY, TRL):
        job = Job.parse(text, folder)
        (folder / "resolved.yaml").write_text(job.resolved_yaml())
        assert Job.from_resolved(folder / "resolved.yaml") == job


@pytest.mark.parametrize(
    ("lines", "share", "said"),
    [
        ("val_set_size: 0.5\nevals_per_epoch: 4\nnum_epochs: 5\n", 1 / 20, "evals_per_epoch is eval_steps"),
        ("val_set_size: 0.5\nevals_per_epoch: 4\n", 1 / 4, "evals_per_epoch is eval_steps"),
        ("val_set_size: 0.5\nevals_per_epoch: 1\nnum_epochs: 1\n", None, "an evaluation comes after each epoch"),
        ("val_set_size: 0\nevals_per_epoch: 4\n", None, "there is nothing to evaluate on"),
        ("val_set_size: 0.5\nevals_per_epoch: 0\n", None, None),
        (f"{OURS}val_size: 2\nevals_per_epoch: 4\n", 1 / 12, "evals_per_epoch is eval_steps"),
        (f"{OURS}val_size: 2\nevals_per_epoch: 4\nepochs: 2\n", 1 / 8, "evals_per_epoch is eval_steps"),
        (f"{OURS}evals_per_epoch: 4\n", None, "there is nothing to evaluate on"),
    ],
)
def test_evaluations_per_epoch_are_a_share_of_the_run(
    lines: str, share: float | None, said: str | None, folder: Path
) -> None:
    job, notes = Job.parse_with_notes(lines if lines.startswith(OURS) else AXOLOTL + lines, folder)
    assert job.eval_steps == share
    about = [note for note in notes if "evals_per_epoch" in note]
    assert not about if said is None else len(about) == 1 and said in about[0]
    if share is not None:  # so many evaluations in an epoch of 1000 steps
        times = yaml.safe_load(lines)["evals_per_epoch"]
        assert job.eval_every(round(1000 * job.num_train_epochs)) == 1000 / times


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ("val_set_size: 2\nevals_per_epoch: 4\neval_steps: 7\n", "both mean eval_steps; keep one"),
        ("val_set_size: 2\nevals_per_epoch: 4\neval_steps: 4\n", "both mean eval_steps; keep one"),
        ("val_set_size: 2\nevals_per_epoch: 4\neval_strategy: epoch\n", "eval_strategy is epoch, which means one"),
        ("val_set_size: 2\nevals_per_epoch: often\n", 'it is "often"; it must be a number above 0'),
    ],
)
def test_evaluations_per_epoch_that_cannot_be_are_refused(lines: str, words: str, folder: Path) -> None:
    with pytest.raises(UserError, match=r"job\.yaml") as refused:
        Job.parse(AXOLOTL + lines, folder)
    assert words in str(refused.value) and len(refused.value.numbers) == 1


def test_a_quantized_base_is_one_line_whatever_stands_beside_it(folder: Path) -> None:
    keys = "adapter: qlora\nload_in_4bit: true\nquantize_moe_experts: true\nlora_r: 8\nlora_alpha: 16\n"
    keys += "lora_target_linear: true\n"
    with pytest.raises(UserError, match="a base quantized in another way than load_in_4bit and") as refused:
        Job.parse(AXOLOTL + "gptq: true\n" + keys, folder)
    assert len(refused.value.numbers) == 1


def test_a_base_in_8_bits_is_so_in_each_tools_words(folder: Path) -> None:
    keys = "adapter: lora\nload_in_8bit: true\nload_in_4bit: false\nlora_r: 8\nlora_alpha: 9\nlora_target_modules: q\n"
    for text in (AXOLOTL + keys, LLAMA_FACTORY + "quantization_bit: 8\n", TRL + "use_peft: true\nload_in_8bit: true\n"):
        job = Job.parse(text, folder)
        assert (job.method, job.load_in_8bit, job.load_in_4bit) == ("lora", True, False)


def test_a_base_in_4_bits_is_doubly_quantized_where_the_tool_has_it_so(folder: Path) -> None:
    axolotl = "adapter: qlora\nload_in_4bit: true\nlora_r: 8\nlora_alpha: 16\nlora_target_linear: true\n"
    for text, double in (
        (AXOLOTL + axolotl, True),
        (LLAMA_FACTORY + "quantization_bit: 4\n", True),
        (TRL + "use_peft: true\nload_in_4bit: true\n", False),
    ):
        job = Job.parse(text, folder)
        assert (job.load_in_4bit, job.bnb_4bit_quant_type, job.bnb_4bit_use_double_quant) == (True, "nf4", double)


def test_values_that_are_done_otherwise_are_said(folder: Path) -> None:
    keys = "optimizer: adamw_torch_4bit\nattn_implementation: flash_attention_2\n"
    job, notes = Job.parse_with_notes(AXOLOTL + keys, folder)
    assert job.optim == "adamw_torch"
    assert any("optimizer: adamw_torch_4bit (AdamW's moments are in fp32 here" in line for line in notes)
    assert any("attn_implementation: flash_attention_2 (attention is PyTorch's sdpa" in line for line in notes)


def test_loraplus_of_axolotl_decays_nothing(folder: Path) -> None:
    (folder / "model" / "model.safetensors").touch()
    plus = "loraplus_lr_ratio: 16\nweight_decay: 0.1\n"
    text = AXOLOTL + "adapter: lora\nlora_r: 4\nlora_alpha: 8\nlora_target_linear: true\n" + plus
    job, notes = Job.parse_with_notes(text, folder)
    assert (job.loraplus_lr_ratio, job.weight_decay) == (16.0, 0.0)
    assert any("weight_decay is 0, as axolotl's LoRA+ has none" in note for note in notes)
    job = Job.parse(LLAMA_FACTORY + "finetuning_type: lora\n" + plus, folder)
    assert (job.loraplus_lr_ratio, job.weight_decay) == (16.0, 0.1)


@pytest.mark.parametrize(
    ("lines", "begins"),
    [
        ("pissa_init: true\n", "pissa_niter_16"),
        ("pissa_init: true\npissa_iter: 4\npissa_convert: true\n", "pissa_niter_4"),
        ("pissa_init: true\npissa_iter: -1\n", "pissa"),
        ("pissa_init: false\npissa_iter: 4\n", True),
    ],
)
def test_llama_factorys_pissa_approximates_unless_it_is_told_not_to(
    folder: Path, lines: str, begins: str | bool
) -> None:
    text = LLAMA_FACTORY + "finetuning_type: lora\nlora_rank: 8\nlora_target: all\n" + lines
    assert Job.parse(text, folder).init_lora_weights == begins


def test_pissa_under_two_names_is_one_where_both_mean_the_same(folder: Path) -> None:
    text = LLAMA_FACTORY + "finetuning_type: lora\npissa_init: true\ninit_lora_weights: "
    assert Job.parse(text + "pissa_niter_16\n", folder).init_lora_weights == "pissa_niter_16"
    with pytest.raises(UserError, match="pissa_init is given too, and both mean init_lora_weights; keep one"):
        Job.parse(text + "pissa\n", folder)


@pytest.mark.parametrize("count", ["0", "true", "some", "1000"])
def test_a_pissa_of_no_number_of_iterations_is_refused(folder: Path, count: str) -> None:
    text = LLAMA_FACTORY + f"finetuning_type: lora\npissa_init: true\npissa_iter: {count}\n"
    with pytest.raises(UserError, match=r"pissa_iter: it is .*; it must be a number of iterations, or -1"):
        Job.parse(text, folder)


def test_muon_has_the_rates_of_the_tool_whose_file_it_is(folder: Path) -> None:
    (ours, notes), (axolotls, told) = (
        Job.parse_with_notes(text + "muon\n", folder) for text in (OURS + "optim: ", AXOLOTL + "optimizer: ")
    )
    factorys, _ = Job.parse_with_notes(LLAMA_FACTORY + "use_muon: true\noptim: adamw_torch\n", folder)
    assert {job.optim for job in (ours, axolotls, factorys)} == {"muon"}
    assert ours.muon_adjust_lr_fn == factorys.muon_adjust_lr_fn == "match_rms_adamw"
    assert axolotls.muon_adjust_lr_fn == "original"
    assert any("its Muon is torch.optim.Muon here" in note for note in told)
    assert any(note.startswith("optim: muon trains matrices, AdamW the rest") for note in notes)
    assert any("max_grad_norm: 0 leaves it to the GPU" in note for note in notes)
    decaying = {
        text: any("leaves biases and norms alone" in note for note in Job.parse_with_notes(text, folder)[1])
        for text in (
            LLAMA_FACTORY + "use_muon: true\nweight_decay: 0.1\n",
            LLAMA_FACTORY + "use_muon: true\n",
            LLAMA_FACTORY + "weight_decay: 0.1\n",
            OURS + "optim: muon\nweight_decay: 0.1\n",
        )
    }
    assert list(decaying.values()) == [True, False, False, False]
    without, _ = Job.parse_with_notes(LLAMA_FACTORY + "use_muon: false\n", folder)
    assert without.optim == "adamw_torch_fused"


def test_muons_rates_without_muon_are_told_to_be_without_use(folder: Path) -> None:
    rates = OURS + "muon_adjust_lr_fn: original\n"
    notes = [Job.parse_with_notes(rates + more, folder)[1] for more in ("", "optim: muon\n")]
    assert [any(note.startswith("muon_adjust_lr_fn is not used") for note in each) for each in notes] == [True, False]


@pytest.mark.parametrize("text", [OURS + "optim: muon\n", LLAMA_FACTORY + "use_muon: true\n"])
def test_muon_with_states_on_disk_is_refused_in_one_line(folder: Path, text: str) -> None:
    with pytest.raises(UserError) as refused:
        Job.parse(text + f"disk_paths: {folder}\n", folder)
    (line,) = refused.value.numbers
    assert "disk_paths are given too, and Muon's states stay in memory: use adamw_torch, or leave" in line


@pytest.mark.parametrize("name", ["adamw_bnb_8bit", "adamw_8bit", "paged_adamw_8bit", "adamw_torch_8bit"])
def test_an_optimizer_with_moments_in_8_bits_is_one(folder: Path, name: str) -> None:
    for text in (AXOLOTL + f"optimizer: {name}\n", LLAMA_FACTORY + f"optim: {name}\n", TRL + f"optim: {name}\n"):
        job, notes = Job.parse_with_notes(text, folder)
        assert job.optim == "adamw_8bit"
        assert any(note.startswith("optim: adamw_8bit rounds AdamW's moments") for note in notes)


def test_states_in_8_bits_cannot_be_on_a_disk(folder: Path) -> None:
    with pytest.raises(UserError) as told:
        Job.parse(AXOLOTL + f"optimizer: adamw_bnb_8bit\ndisk_paths: {folder}\n", folder)
    (number,) = told.value.numbers
    assert "states in 8 bits stay in memory: use adamw_torch, or leave disk_paths out" in number


def test_an_adapter_that_is_there_has_all_that_the_tools_would_have_given(folder: Path) -> None:
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 12, "lora_dropout": 0.2, "target_modules": ["q_proj"]}
    (folder / "saves").mkdir()
    (folder / "saves" / "adapter_config.json").write_text(json.dumps(config))
    (folder / "saves" / "adapter_model.safetensors").touch()
    for text in (
        AXOLOTL + "adapter: lora\nlora_model_dir: saves\n",
        LLAMA_FACTORY + "adapter_name_or_path: saves\n",
        TRL + "use_peft: true\nadapter_name_or_path: saves\n",
    ):
        job = Job.parse(text, folder)
        assert (job.lora_r, job.lora_alpha, job.lora_dropout, job.lora_target_modules) == (4, 12.0, 0.2, ("q_proj",))
        assert "lora_" not in note(text, folder)
    assert "method lora" in note(LLAMA_FACTORY + "adapter_name_or_path: saves\n", folder)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (LLAMA_FACTORY.replace("sft", "pt") + "finetuning_type: full\n", "all texts are learned to their end"),
        (
            "base_model: model\nlearning_rate: 1e-4\npretraining_dataset: text.jsonl\nmax_steps: 3\n"
            "sample_packing: true\n",
            "where there the next repeats up to 256 tokens",
        ),
        (
            "base_model: model\nlearning_rate: 1e-4\npretraining_dataset: text.jsonl\nmax_steps: 3\n",
            "each text has an end token",
        ),
        (
            AXOLOTL + "sample_packing: true\nmodel_config: {output_router_logits: true}\n",
            "the routers' loss leaves out the padding of packed rows",
        ),
    ],
    ids=["short rows", "long texts", "ends", "routers"],
)
def test_what_is_learned_otherwise_is_said_and_stays_in_an_imported_file(text: str, said: str, folder: Path) -> None:
    (folder / "text.jsonl").write_text('{"text": "a"}\n')
    (note,) = (line for line in Job.parse_with_notes(text, folder)[1] if line.startswith("in this file of "))
    assert said in note
    assert f"# {note}" in imported(text, folder, "job.yaml").splitlines()
