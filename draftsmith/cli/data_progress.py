"""How far the making of training data is: a bar on a terminal, a line now and then elsewhere.

Called by `data` and `data_prepare`. Invariant: all of it goes to stderr.
"""

from __future__ import annotations

import time
from typing import final

from draftsmith.cli.progress import Bar
from draftsmith.training.text_store import TextStore


@final
class TextBar(Bar):
    """While texts are written."""

    def __init__(self, progress: tuple[int, int]) -> None:
        super().__init__(*progress)
        self._began = time.perf_counter()

    def update(self, done: int, store: TextStore, written: int) -> None:
        """Tell how much there is; `written`: tokens of this run."""
        speed = written / max(time.perf_counter() - self._began, 1e-9)
        dropped = sum(store.dropped.values())
        self.show(done, f"{store.num_texts} kept, {dropped} dropped, {store.answer_tokens} tokens, {speed:.0f} tok/s")


@final
class PrepareBar(Bar):
    """While texts are made token ids."""

    def __init__(self) -> None:
        super().__init__(0, 1)

    def update(self, done: int, total: int) -> None:
        """Tell how many texts of how many are done."""
        if done == total or done % 50 == 0:
            self.tell(done, total, f"{done} of {total} texts")
