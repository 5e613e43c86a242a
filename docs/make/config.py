"""Makes the page of the daemon's settings and of the environment variables that offmate reads."""

from __future__ import annotations

from offmated.config import SETTINGS

_HEAD = """\
# Settings of the daemon

The daemon needs no settings. It reads them at its start: from environment variables, else from `config.toml` in the
state folder. After a change type `offmate down`, then `offmate up`. All values in `config.toml` are texts in quotes:

```toml
{example}
```

At each start the daemon makes `config.toml` unreadable for other users, because it may contain passwords.
"""

VARIABLES = {
    "OFFMATE_HOME": "The state folder: jobs, queue, checkpoints, models, settings and traces. Without it, the state "
    "folder is `$XDG_STATE_HOME/offmate`, else `~/.local/state/offmate`. Another folder is another queue with its "
    "own daemon.",
    "OFFMATE_HOST": "The address of another machine's daemon, such as `http://127.0.0.1:8477`. Commands that show or "
    "change jobs then go to that daemon.",
    "OFFMATE_TOKEN": "The token of the daemon at `OFFMATE_HOST`. It is in the file `api-token` in the state folder of "
    "that machine.",
    "XDG_STATE_HOME": "The folder in which the state folder is, where `OFFMATE_HOME` is not set.",
    "XDG_RUNTIME_DIR": "The folder for the daemon's sockets, where their paths below the state folder would be too "
    "long and `OFFMATE_HOME` is not set.",
    "XDG_CACHE_HOME": "The folder in which offmate keeps traces of models (where `OFFMATE_HOME` is not set) and "
    "compiled code. Without it, `~/.cache`.",
    "CUDA_VISIBLE_DEVICES": "The GPUs that CUDA shows. offmate uses the first one. Empty or `-1`: none.",
    "CUBLAS_WORKSPACE_CONFIG": "The workspace of cuBLAS, which a plan takes into account.",
    "CUBLASLT_WORKSPACE_SIZE": "The workspace of cuBLASLt in KiB, which a plan takes into account.",
    "CC": "The C compiler for offmate's own kernels on the CPU.",
    "TORCHINDUCTOR_CACHE_DIR": "The folder in which PyTorch's inductor keeps compiled code. Without it, a folder in "
    "offmate's cache folder.",
    "HF_HOME": "The folder of Hugging Face's libraries, in which models and data are.",
    "HF_HUB_CACHE": "The folder of files from the Hugging Face hub. Without it, `hub` in `HF_HOME`.",
    "HF_DATASETS_CACHE": "The folder of data that the library `datasets` has prepared. Without it, `datasets` in "
    "`HF_HOME`.",
    "HF_HUB_OFFLINE": "Set to `1`: the Hugging Face hub is not asked. Models and data must be on this machine.",
    "LLAMA_CPP": "The folder of llama.cpp, whose converter `offmate export` uses for GGUF files, or "
    "the converter itself.",
    "WANDB_PROJECT": "The project in wandb of jobs without [`wandb_project`](keys.md#wandb_project).",
    "MLFLOW_TRACKING_URI": "The server or store of mlflow for jobs without "
    "[`mlflow_tracking_uri`](keys.md#mlflow_tracking_uri).",
    "MLFLOW_EXPERIMENT_NAME": "The experiment in mlflow of jobs without "
    "[`mlflow_experiment_name`](keys.md#mlflow_experiment_name).",
    "XDG_CONFIG_HOME": "The folder in which `offmate service install` writes the systemd unit, in `systemd/user`. "
    "Without it, `~/.config`.",
}
"""Environment variable -> its meaning, in Markdown; without the variables of settings."""


def page() -> str:
    """The Markdown of reference/config.md. A setting's anchor is its key."""
    example = "\n".join(f'{setting.key} = "{setting.example}"' for setting in SETTINGS)
    parts = [_HEAD.format(example=example)]
    for setting in SETTINGS:
        parts.append(
            f"## `{setting.key}` {{ #{setting.key} }}\n\n{setting.meaning}\n\n"
            f"- Example: `{setting.example}`\n- Environment variable: `{setting.variable}`\n"
            f"- Without it: {setting.default}\n"
        )
    parts.append("## Other environment variables\n\n| variable | meaning |\n| --- | --- |")
    parts += [f"| `{name}` | {meaning} |" for name, meaning in VARIABLES.items()]
    return "\n".join(parts) + "\n"
