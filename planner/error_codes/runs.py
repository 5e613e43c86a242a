"""Explains the errors of plans and runs: memory, disks, training, the trained model."""

from __future__ import annotations

THEMES: dict[str, dict[str, tuple[str, str]]] = {
    "The plan": {
        "budget-too-small": (
            "The job needs more GPU memory than `gpu_budget`, however its step is arranged. The error names the least "
            "that it needs.",
            "Give that `gpu_budget`, a smaller `per_device_train_batch_size` or `max_length`, or `method: lora`. "
            "`offmate plan` names changes with which the job fits.",
        ),
        "budget-too-large": (
            "A budget is more than the machine has.",
            "Give a smaller budget, or leave it out.",
        ),
        "host-memory-too-small": (
            "No schedule fits `cpu_budget`.",
            "Give a larger `cpu_budget` or a smaller batch.",
        ),
        "disk-too-small": (
            "`disk_budget`, or the free space on the drive, has no room for what the plan puts there.",
            "Free some space, give a larger `disk_budget` or `cpu_budget`, or name a folder on a larger drive.",
        ),
        "disk-worn": (
            "The run would wear the drive by more than offmate accepts unasked.",
            "Submit the job with `disk_rated_writes` (the drive's rated writes, or `accept`), or with a larger "
            "`cpu_budget`.",
        ),
        "evaluation-does-not-fit": (
            "An evaluation does not fit `gpu_budget`.",
            "Give a larger `gpu_budget`, or do what the error's hint says.",
        ),
        "generation-does-not-fit": (
            "The generation of samples does not fit `gpu_budget`.",
            "Give a larger `gpu_budget`, or fewer or shorter `sample_prompts`.",
        ),
        "no-plan": (
            "The job, or the run folder, has no plan, or its plan cannot be read.",
            "Wait until the job is planned. `offmate show ID` says how far it is.",
        ),
        "no-picture": (
            "The plan of the job cannot be drawn for the page.",
            "`offmate show ID` shows the plan as text.",
        ),
        "plan-not-usable": (
            "The plan in the run folder would not compute what it should.",
            "Forget it as the hint says (`offmate plans forget`), then submit the job again.",
        ),
        "process-hangs": (
            "The planner had not ended after its time limit, and was killed because other jobs waited.",
            "Read the job's log. A pattern or a template in the job file may take too long.",
        ),
    },
    "Reproducible results": {
        "not-deterministic": (
            "`deterministic: true` is set, and the job has an operation that has no deterministic kernel.",
            "Leave `deterministic` out. The bits of two runs may then differ.",
        ),
        "cublas-workspace": (
            "`deterministic: true` is set, and the variable `CUBLAS_WORKSPACE_CONFIG` lets results of cuBLAS differ.",
            "Unset `CUBLAS_WORKSPACE_CONFIG`, then restart offmate.",
        ),
        "not-certified": (
            "An encoder-decoder can be certified only with all its layers.",
            "Leave `--layers` out, on a machine where plain PyTorch has enough memory.",
        ),
        "no-room": (
            "Not even one layer of the model has room in plain PyTorch, so nothing can be compared.",
            "Certify a job of the same model with a smaller `per_device_train_batch_size` or `max_length`.",
        ),
        "too-few-steps": (
            "The job has too few steps for a stop in its middle.",
            "Give a job with more data or a larger `max_steps`.",
        ),
        "steps-not-done": (
            "The steps that were to be compared ended with an error, which is printed above.",
            "Correct that error. It would end the job, too.",
        ),
    },
    "Memory and processes": {
        "out-of-memory": (
            "The GPU had less free memory than the plan needs.",
            "The job is planned again with less memory by itself, at most three times. After that give a smaller "
            "`gpu_budget`, or close other programs that use the GPU.",
        ),
        "host-memory-not-registered": (
            "CUDA could not lock as much host memory as the plan moves.",
            "The job is planned again by itself with what CUDA could lock. After that give a smaller "
            "`cpu_budget`. On WSL2 raise `memory=` in .wslconfig.",
        ),
        "killed-for-memory": (
            "The kernel killed the process because the machine had no memory left.",
            "The job is planned again with less memory by itself, at most three times. After that give a smaller "
            "`cpu_budget`, or close other programs.",
        ),
        "no-memory": (
            "The system gave a process no memory, or no thread.",
            "Close other programs and try again. If the error names `ulimit -v`, raise it and restart the daemon.",
        ),
        "planner-failed": (
            "The planner ended with an error that it could not describe.",
            "Read the job's log.",
        ),
        "trainer-failed": (
            "The trainer ended with an error that it could not describe.",
            "Read the job's log.",
        ),
        "crashed": (
            "The process of the job died three times without a new checkpoint.",
            "Read the job's log, remove the cause, then `offmate retry ID`.",
        ),
    },
    "The training": {
        "non-finite": (
            "A loss, a gradient or a score is not a finite number: the training has diverged, or the reference "
            "model gives such numbers.",
            "Use a lower `learning_rate`, more `warmup_steps` or `max_grad_norm: 1.0`, and submit a new job. For "
            "a reference model check its weights.",
        ),
        "model-not-savable": (
            "A file beside the weights of the model cannot be written. offmate tries this before the first step.",
            "Correct the file that the error names in the folder of the model or the tokenizer.",
        ),
        "job-changed": (
            "The job, its data or its length differ from those of the checkpoint.",
            "Undo the change, or submit a new job.",
        ),
        "cannot-go-on": (
            "A run cannot be continued: its checkpoint is lost, damaged or of another model, or the job has a key "
            "with which a longer run is not supported.",
            "`offmate rerun ID` starts from the beginning.",
        ),
        "checkpoint-not-readable": (
            "The disk cannot read the checkpoint now. The checkpoint is kept.",
            "Check the disk and the rights of the folder, then `offmate retry ID`.",
        ),
        "states-torn": (
            "The optimizer states on disk are not those of the checkpoint.",
            "Check that the drive is there and whole. Otherwise submit the job again.",
        ),
    },
    "Disks and folders": {
        "disk-full": (
            "A disk or a quota has no room.",
            "Free some space. A job then continues by itself from its last checkpoint. Otherwise name a folder on "
            "another disk.",
        ),
        "disk-failed": (
            "A drive is not mounted, cannot be read or written, or returns other bytes than were written.",
            "Check the drive and the rights of the folder. Then `offmate retry ID` continues from the last checkpoint.",
        ),
        "disk-is-memory": (
            "A folder of `disk_paths` is in memory (tmpfs), not on a drive.",
            "Name a folder on a drive.",
        ),
        "disk-not-direct": (
            "The file system of a folder in `disk_paths` does not support direct reads and writes.",
            "Name a folder on ext4, xfs or btrfs.",
        ),
        "output-exists": (
            "The output folder is not empty.",
            "Give another `output_dir`, or move its files. `offmate rerun ID` trains a job again, into its run folder.",
        ),
        "output-unwritable": (
            "The output folder cannot be made or written.",
            "Give another `output_dir`. If the job is already trained, correct the folder, then `offmate retry "
            "ID` delivers the model.",
        ),
        "output-taken": (
            "Another unfinished job writes its model to the same folder.",
            "Give another `output_dir`, or cancel the other job.",
        ),
        "in-state-folder": (
            "A folder that you named is in offmate's state folder or contains it. offmate may remove files there.",
            "Name a folder outside of the state folder.",
        ),
    },
    "The trained model": {
        "no-model": (
            "The job has no model yet, or its folder was moved.",
            "Wait until the job is done, or put the folder back.",
        ),
        "nothing-to-export": (
            "The job has no model yet.",
            "Wait until the job is done.",
        ),
        "nothing-to-merge": (
            "The job has no adapters that could be merged.",
            "Copy the folder in the error: it has all weights.",
        ),
        "not-mergeable": (
            "The adapters cannot be merged: there is too little free host memory, or the base stores its weights "
            "in another form than its layers.",
            "Stop other programs, use a machine with more memory, or merge with peft as the hint says.",
        ),
        "output-dir-used": (
            "The folder or the file to write is there already.",
            "Name a new one.",
        ),
        "bad-gguf-type": (
            "`--gguf` names a type that the converter does not write.",
            "Use `auto`, `f32`, `f16`, `bf16` or `q8_0`. llama.cpp's llama-quantize makes smaller ones from such "
            "a file.",
        ),
        "not-converted": (
            "llama.cpp's converter failed. Its own message is above.",
            "Update llama.cpp. Of adapters `offmate export ID FOLDER` writes what the converter reads; else it reads "
            "the job's model folder.",
        ),
        "gpu-busy": (
            "A job has the GPU, and the command needs it.",
            "Wait for the job (`offmate wait`), or type `offmate pause`, then `offmate resume` afterwards.",
        ),
    },
}
