"""Explains the errors of models: loading, structure, loss, what is trained."""

from __future__ import annotations

THEMES: dict[str, dict[str, tuple[str, str]]] = {
    "The Hugging Face hub": {
        "hub-not-reached": (
            "The Hugging Face hub cannot be reached.",
            "Check the network, then submit again. A job that is already queued asks again by itself. For a "
            "folder on this machine give its path, such as `./name`.",
        ),
        "hub-offline": (
            "The model or the data are not on this machine, and `HF_HUB_OFFLINE` forbids to ask the hub.",
            "Download them first (`hf download`), or unset `HF_HUB_OFFLINE`.",
        ),
        "hub-gated": (
            "The hub gives the model or the data only to people who have accepted its terms.",
            "Accept the terms on its page at huggingface.co, and log in with `hf auth login` as the user that "
            "runs the daemon. Then submit or retry the job.",
        ),
        "hub-not-found": (
            "The hub has no repository or revision with this name, or it is private.",
            "Check the name and the revision. If it is private, log in with `hf auth login`.",
        ),
    },
    "The model and its weights": {
        "model-not-usable": (
            "The model cannot be loaded, or cannot be trained as it is, such as with gradient checkpointing "
            "switched on or with backward hooks.",
            "Do what the error's hint says. The model must be one that transformers knows.",
        ),
        "model-has-own-code": (
            "The model comes with Python code of its own, which offmate never runs.",
            "Use a model that transformers knows without such code.",
        ),
        "unknown-weights": (
            "The model folder has weights only in formats that offmate does not read, such as `.pth`, `.h5` or "
            "`.gguf`.",
            "Download or convert the weights as safetensors. To train from random weights, move the weight files "
            "out of the folder.",
        ),
        "weights-not-usable": (
            "Weight files are missing, cut short, pointers of git-lfs, or pickles that hold more than tensors.",
            "Download the model again, or convert the weights to safetensors as the hint says.",
        ),
        "weights-not-in-files": (
            "A weight in memory differs from the model's files, so it cannot be read from them during training.",
            "`offmate retry`. If that does not help, give a larger `cpu_budget`.",
        ),
        "base-changed": (
            "The files of the model or of its tokenizer changed after the job was submitted.",
            "Put the files back, or accept the new ones: `offmate retry ID --allow-changed-model`.",
        ),
        "base-quantized": (
            "The model was saved in a quantized form that the job cannot use.",
            "Use the model as it was published in bf16, or follow the error's hint.",
        ),
        "max-length-too-large": (
            "A row of the data has more tokens than the model has positions. This is checked when the model is loaded "
            "for training; the planner's own check has the code `max-length-too-long`.",
            "Give a `max_length` of at most the number of positions in the error.",
        ),
        "max-length-too-long": (
            "The rows that the planner plans have more tokens than the model has positions. When the model is loaded "
            "for training, a check of the data's rows has the code `max-length-too-large`.",
            "Give a `max_length` of at most the number in the error.",
        ),
        "vocabulary-mismatch": (
            "The tokenizer has tokens for which the model has no row in its embedding.",
            "Use the model's own tokenizer.",
        ),
        "key-not-for-model": (
            "A key of the job does not apply to this kind of model, such as a key for chats with an encoder-decoder.",
            "Leave the key out.",
        ),
        "packing-not-isolated": (
            "The model does not keep packed documents apart, as `packing: true` demands.",
            "Use `packing: false`, or `packing: wrapped`, in which documents see each other.",
        ),
        "rope-by-length": (
            "The rotary positions of the model depend on the longest row of a micro-batch, and the data have rows "
            "on both sides of the length where they change.",
            "Give the `max_length` that the hint names.",
        ),
        "no-router-loss": (
            "`router_aux_loss_coef` is set for a model that has no auxiliary loss of routers.",
            "Leave `router_aux_loss_coef` out.",
        ),
        "router-loss-per-slice": (
            "The planner is to choose the micro-batches of a mixture of experts that trains with its router loss, "
            "and the choice would change the result.",
            "Give `per_device_train_batch_size` and `gradient_accumulation_steps`, or `router_aux_loss_coef: 0`.",
        ),
        "loss-per-slice": (
            "The model averages its loss within each micro-batch, so several micro-batches would give another "
            "result than one.",
            "Use one micro-batch per step: `gradient_accumulation_steps: 1` with a larger "
            "`per_device_train_batch_size`.",
        ),
        "loss-not-smoothed": (
            "The model has a loss of its own, to which `label_smoothing_factor` cannot be applied.",
            "Leave `label_smoothing_factor` out.",
        ),
        "loss-not-weighted": (
            "The model has a loss of its own, in which all tokens count alike, so `loss_weighting: documents` "
            "cannot be applied.",
            "Leave `loss_weighting` out.",
        ),
        "loss-not-scored": (
            "`preference` is set for a model that computes a loss of its own.",
            "Use a model with the causal language-model loss of transformers.",
        ),
        "loss-not-in-chunks": (
            "`exact: false` asks for a loss in chunks, and the model uses its logits for more than the loss.",
            "Use `exact: true`.",
        ),
        "logits-read-again": (
            "The model computes more than one cross entropy from its logits.",
            "Use a model whose loss is one cross entropy of the logits.",
        ),
        "logits-changed": (
            "The model or its backward pass writes over the logits, which are still needed.",
            "Change the model's code: compute new logits in place of in-place changes, and read them before backward.",
        ),
        "logits-not-seen": (
            "The model passes its logits to code that PyTorch's operations do not show.",
            "Change the model's code: compute the loss from the logits with PyTorch's operations.",
        ),
    },
    "The parts of a model": {
        "blocks-not-found": (
            "offmate cannot divide the model into blocks that run one after the other, each once.",
            "Use a model with such a structure. The error says what was found.",
        ),
        "block-not-traceable": (
            "A block of the model cannot be traced.",
            "Choose another implementation if the model has one, such as `attn_implementation: sdpa` or `eager`.",
        ),
        "block-not-usable": (
            "A block of the model can neither be traced nor run as it is.",
            "Choose another implementation of this part in the model's config, if there is one.",
        ),
        "block-depends-on-data": (
            "The memory that a block needs depends on its data and cannot be bounded.",
            "Keep the block's code from turning tensors into Python numbers; use `torch.where`.",
        ),
        "frame-not-traceable": (
            "The model's code outside of its blocks cannot be profiled.",
            "Use a model whose forward runs its blocks one after the other, each once.",
        ),
        "buffer-shared": (
            "A block changes a buffer that it shares with another block, so several micro-batches would change it "
            "in another order than in plain PyTorch.",
            "Train with one, larger, micro-batch per step.",
        ),
        "layers-dropped": (
            "The model leaves out layers at random (layerdrop), and a plan is for all layers.",
            "Set layerdrop to 0 in the model's config.json.",
        ),
        "weight-read-outside": (
            "A weight is read outside of its block, where it may not be on the GPU.",
            "Change the model's code so that only the block reads its weights.",
        ),
    },
    "What is trained": {
        "lora-targets": (
            "`lora_target_modules`, or a key that names layers of the adapters, matches no layer of this model, "
            "or a layer that cannot have an adapter.",
            "Use names from the error, or `lora_target_modules: all-linear`.",
        ),
        "lora-modules": (
            "`lora_modules_to_save` names a module that the model does not have.",
            "Use the model's own names, such as `embed_tokens` and `lm_head`.",
        ),
        "adapter-not-usable": (
            "The adapter to continue does not belong to this model, or contains weights that differ from the "
            "model's own.",
            "Give the model that the adapter was trained on, or leave `adapter_name_or_path` out.",
        ),
        "adapter-not-readable": (
            "The files of the adapter to continue cannot be read.",
            "Put the files back, then `offmate retry ID`.",
        ),
        "adapter-changed": (
            "The adapter to continue is not the one with which the job was submitted.",
            "Put the adapter back, or submit the job again.",
        ),
        "beginning-gone": (
            "The file with the initial values of the job's adapters is lost, so their effect on the model is unknown.",
            "Put the file back, or start over with `offmate rerun ID`.",
        ),
        "lsp-no-layer": (
            "No layer of the model can have a core of `method: lsp`: there is no linear layer, or all are too narrow.",
            "Use `method: lora`, or a smaller `lsp_nonzeros`.",
        ),
        "trainable-not-there": (
            "A pattern in `trainable` matches no parameter of the model, or nothing would be trained.",
            "Correct the pattern. It must match a name from its beginning.",
        ),
        "trainable-beside-adapters": (
            "`trainable` names other parameters than those of the LoRA adapters.",
            "Leave `trainable` out. `lora_target_modules` says which layers get adapters.",
        ),
        "tokens-not-learned": (
            "The job adds tokens, and the embedding or the head is frozen.",
            "Train them, too: name them in `lora_modules_to_save` or in `trainable`.",
        ),
        "layers-left-out": (
            "`--layers` leaves out every layer that the job trains.",
            "Give a larger `--layers`.",
        ),
        "pattern-too-slow": (
            "A pattern takes too long to match the names of this model's parameters.",
            "Write a simpler pattern.",
        ),
        "rate-of-nothing": (
            "A learning rate is set for weights that the job does not train.",
            "Leave the key out, or train those weights.",
        ),
    },
    "Preferences and reward models": {
        "no-reward-model": (
            "transformers has no classifier of this model's family that scores the last token.",
            "Use a model of another family, such as Llama, Qwen, Mistral, Gemma or Phi-3.",
        ),
        "no-padding-token": (
            "The tokenizer has neither a token for padding nor one for the end of a text.",
            "Name one of its tokens: `special_tokens: {pad_token: …}`.",
        ),
        "ref-model-differs": (
            "`ref_model` has weights with other names or sizes than the model.",
            "Give a model of the same type and size.",
        ),
        "reference-does-not-fit": (
            "The pass of the reference model needs more than `gpu_budget`.",
            "Give a larger `gpu_budget` or a smaller `per_device_train_batch_size`.",
        ),
        "reference-gone": (
            "The log-probabilities of the reference, which belong to the run, are lost or damaged.",
            "Start over with `offmate rerun ID`.",
        ),
        "not-for-reward-models": (
            "The command is for models that write text, and the job trained a reward model.",
            "The README.md in the model's folder says how to load it.",
        ),
    },
}
