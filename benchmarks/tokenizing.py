"""A job's data from a file to packed rows beside the tokenizer library alone on the same texts: seconds of both, turn
by turn in one process, by the clock and of processors, and the anonymous memory that ours takes. Where others use the
machine, the processors' seconds say more.

    python benchmarks/tokenizing.py [MEGABYTES] [TURNS]

Texts are Python's own library, cut into passages of 1500 characters; the tokenizer, of 16,000 tokens, learns on a fifth
of them.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, LlamaConfig, PreTrainedTokenizerFast

from planner.job.schema import Job
from worker.data.batches import Batches

_PASSAGE = 1500


def main(megabytes: float, turns: int) -> None:
    """Print a line for each turn."""
    folder = Path(tempfile.mkdtemp())
    sources = [path.read_text("utf-8", errors="ignore") for path in sorted(Path(os.__file__).parent.glob("*.py"))]
    passages = [text[at : at + _PASSAGE] for text in sources for at in range(0, len(text), _PASSAGE)]
    library = Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=16_000, special_tokens=["<|end|>"], show_progress=False)
    library.train_from_iterator(passages[::5], trainer)
    LlamaConfig().save_pretrained(folder / "model")
    fast: Any = PreTrainedTokenizerFast
    fast(tokenizer_object=library, eos_token="<|end|>").save_pretrained(folder / "model")
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    rng, texts, size = random.Random(0), list[str](), 0
    while size < megabytes * 1e6:
        texts.append(rng.choice(passages))
        size += len(texts[-1].encode())
    (folder / "data.jsonl").write_text("".join(f"{json.dumps({'text': text})}\n" for text in texts), "utf-8")
    job = Job.parse("model: model\ndataset: data.jsonl\nmax_length: 2048\npacking: true\n", folder)
    tokenizer(texts[:100])
    for turn in range(turns):
        began, worked = time.perf_counter(), time.process_time()
        for first in range(0, len(texts), 1000):
            tokenizer(texts[first : first + 1000])
        theirs_s, their_work_s = time.perf_counter() - began, time.process_time() - worked
        with _Memory() as memory:
            began, worked = time.perf_counter(), time.process_time()
            rows = Batches(job, tokenizer, folder / "data").rows
            ours_s, our_work_s = time.perf_counter() - began, time.process_time() - worked
        shutil.rmtree(folder / "data")
        print(
            f"turn {turn + 1}: {megabytes:g} MB, the library {theirs_s:.1f} s, ours {ours_s:.1f} s to {rows} packed "
            f"rows: {theirs_s / ours_s:.0%} of its throughput; {their_work_s:.1f} and {our_work_s:.1f} s of "
            f"processors: {their_work_s / our_work_s:.0%}; {memory.grew_mb:.0f} MB more at most",
            flush=True,
        )
    shutil.rmtree(folder)


class _Memory:
    """The most anonymous memory of this process, in MB more than at first."""

    def __enter__(self) -> _Memory:
        self._first, self.grew_mb, self._over = _anonymous_mb(), 0.0, threading.Event()
        self._watch = threading.Thread(target=self._look)
        self._watch.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._watch.join()

    def _look(self) -> None:
        while not self._over.wait(0.05):
            self.grew_mb = max(self.grew_mb, _anonymous_mb() - self._first)


def _anonymous_mb() -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("RssAnon")).split()[1]) / 1024


if __name__ == "__main__":
    main(float(sys.argv[1]) if len(sys.argv) > 1 else 100.0, int(sys.argv[2]) if len(sys.argv) > 2 else 3)
