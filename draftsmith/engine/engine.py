"""The Python API: load a model once, then generate, stream, or do both asynchronously.

    from draftsmith import Engine
    engine = Engine.load("smollm2", drafter="suffix")
    print(engine.generate([{"role": "user", "content": "Hello"}], max_new_tokens=64).text)

Whoever waits for tokens drives the engine: one thread at a time steps, a step serves everybody's requests,
and whoever waits for its own looks again after each. Submitting and cancelling never wait, so they may be
called from an event loop. Invariant: a request's output depends on its prompt, settings and seed alone.
"""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
import itertools
import threading
import warnings
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Series
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Self

from draftsmith.control.base import Controller
from draftsmith.control.choice import make_controller
from draftsmith.core.random import RequestRandom
from draftsmith.core.sampling import Sampler
from draftsmith.core.stats import EventLog
from draftsmith.drafters.base import Drafter, DrafterChoice, TargetInfo
from draftsmith.engine.cost_store import read_costs
from draftsmith.engine.loading import LoadedModel, default_memory_bytes, load_model
from draftsmith.engine.params import GenerationParams, Prompt
from draftsmith.engine.prompts import encode_prompt, is_batch
from draftsmith.engine.results import GenerationResult
from draftsmith.engine.scheduler import Scheduler
from draftsmith.engine.sequence import Sequence
from draftsmith.engine.stop import StopRules
from draftsmith.engine.streams import AsyncTokenStream, Call, TokenStream
from draftsmith.engine.turn import Turn
from draftsmith.errors import DraftsmithError, OptionError
from draftsmith.models.detokenizer import Detokenizer
from draftsmith.models.spec import DecoderSpec
from draftsmith.models.tokenizer import Tokenizer
from draftsmith.registry import DRAFTERS, load_class, parse_selection, read_options


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """How an engine runs.

    `drafter`, `controller`: selections (`NAME[:key=value]*`). `memory_bytes`: budget of the caches, what
    drafters hold per live or reusable token included; None takes half of what is free. It is kept between
    steps; beside it stand weights, a step's activations and noise, both places of a slot while it moves to
    a larger one, and what a drafter remembers of ended requests. `max_batch`: sequences in one step.
    `chunk_rows`: most rows of a step, prompt chunks included; each of `max_batch` sequences drafts within its share of
    them. `prefix_cache`: reuse common prefixes.
    """

    drafter: str = "suffix"
    controller: str = "auto"
    memory_bytes: int | None = None
    max_batch: int = 8
    chunk_rows: int = 512
    prefix_cache: bool = True

    def __post_init__(self) -> None:
        for name in ("max_batch", "chunk_rows"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise OptionError(f"{name} must be a whole number of at least 1, got {value!r}")
        for name in ("drafter", "controller"):
            if not isinstance(getattr(self, name), str):
                raise OptionError(f"{name} must be a selection like 'NAME:key=value', got {getattr(self, name)!r}")
        memory = self.memory_bytes
        if memory is not None and (not isinstance(memory, int) or isinstance(memory, bool) or memory < 1):
            raise OptionError(f"memory_bytes must be a whole number of at least 1, or None, got {memory!r}")
        if not isinstance(self.prefix_cache, bool):
            raise OptionError(f"prefix_cache must be True or False, got {self.prefix_cache!r}")
        if self.chunk_rows < self.max_batch:
            raise OptionError(f"chunk_rows ({self.chunk_rows}) must be at least max_batch ({self.max_batch})")
        if self.drafter != "none" and self.chunk_rows < 2 * self.max_batch:
            warnings.warn(
                f"nothing will be drafted: chunk_rows ({self.chunk_rows}) leaves each of max_batch ({self.max_batch}) "
                "sequences the row of its own token; at least twice max_batch has room for drafts",
                RuntimeWarning,
                stacklevel=3,
            )


class Engine:
    """One target, its drafters and its requests."""

    def __init__(self, model: LoadedModel, settings: EngineSettings | None = None, *, load: Any = None) -> None:
        self._model = model
        self._settings = settings or EngineSettings()
        self._load = load or (lambda name: load_model(name))
        self._ids = itertools.count()
        self._turn = Turn()
        # One thread for all asynchronous steps: every other thread would bring its own OpenMP team.
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="draftsmith-step")
        self._making = threading.Lock()
        self._drafters: dict[str, Drafter] = {}
        self._controller = make_controller(self._settings.controller)
        costs = read_costs(model.identity)
        if costs is not None:
            self._controller.start_from(costs)
        self._scheduler = Scheduler(
            model.backend,
            self._controller,
            memory_bytes=self._settings.memory_bytes or default_memory_bytes(),
            max_batch=self._settings.max_batch,
            chunk_rows=self._settings.chunk_rows,
            prefix_cache=self._settings.prefix_cache,
        )
        self._settings = dataclasses.replace(self._settings, drafter=self._chosen(self._settings.drafter))
        self._drafter(self._settings.drafter)

    @classmethod
    def load(
        cls,
        model: str,
        *,
        backend: str = "auto",
        dtype: str = "auto",
        threads: int | None = None,
        device: str = "cpu",
        **settings: Any,
    ) -> Self:
        """Load a model by name, directory or file, ready to generate.

        `backend`: "auto", "native" with options such as "native:bits=4", or "reference"; `dtype`: what the
        reference backend computes in, "float32", "bfloat16" or "float64"; `threads`: None for all cores;
        `settings`: the fields of `EngineSettings`. Raises `UserError`s.
        """
        known = {item.name for item in dataclasses.fields(EngineSettings)}
        for name in settings:
            if name not in known:
                raise OptionError(f"unknown engine setting {name!r}; allowed: {', '.join(sorted(known))}")
        checked = EngineSettings(**settings)

        def load(name: str) -> LoadedModel:
            return load_model(name, backend=backend, dtype=dtype, threads=threads, device=device)

        return cls(load(model), checked, load=load)

    # -- what it is -------------------------------------------------------------------------------

    @property
    def model_name(self) -> str:
        """The name the model was loaded by."""
        return self._model.name

    @property
    def identity(self) -> Mapping[str, Any]:
        """What costs measured with its model belong to, as `LoadedModel.identity`."""
        return self._model.identity

    @property
    def backend_name(self) -> str:
        """The backend that scores."""
        return self._model.backend_name

    @property
    def spec(self) -> DecoderSpec:
        """The target's shape."""
        return self._model.backend.spec

    @property
    def bits_per_weight(self) -> float:
        """Of the target's matrices as they lie in memory."""
        return 8 * self._model.backend.weight_bytes / self.spec.num_parameters

    @property
    def tokenizer(self) -> Tokenizer:
        """The target's tokenizer."""
        return self._model.tokenizer

    @property
    def eos_ids(self) -> frozenset[int]:
        """The target's own end tokens."""
        return self._model.eos_ids

    @property
    def controller(self) -> Controller:
        """What decides how much is drafted."""
        return self._controller

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of one prompt, chat template applied to messages. Raises `PromptError`."""
        return encode_prompt(prompt, self._model)

    @property
    def controller_name(self) -> str:
        """The controller, as selected."""
        return self._settings.controller

    @property
    def drafter_name(self) -> str:
        """The drafter of requests that name none, as selected; for `auto` the one that was chosen."""
        return self._settings.drafter

    def drafter(self, selection: str) -> Drafter:
        """The engine's drafter of a selection, made on first use."""
        return self._drafter(self._chosen(selection))

    # -- generating -------------------------------------------------------------------------------

    def generate(self, prompt: Prompt | Series[Prompt], **params: Any) -> Any:
        """Generate to the end. One prompt gives a `GenerationResult`, a list of prompts a list of them.

        `prompt`: a raw string, role/content messages, or token ids. `params`: the fields of
        `GenerationParams` and `SamplingParams`. Raises `UserError`s before anything runs.
        """
        many = is_batch(prompt)
        prompts: list[Any] = list(prompt) if many else [prompt]
        events = TokenStream(call := Call(), self._advance, self._cancel)
        groups = self._submit(call, prompts, GenerationParams.create(**params))
        for _ in events:
            pass
        results = [_gather(group) for group in groups]
        return results if many else results[0]

    def stream(self, prompt: Prompt, **params: Any) -> TokenStream:
        """Yield events as tokens come; `event.index` tells samples apart. Closing or dropping it cancels."""
        events = TokenStream(call := Call(), self._advance, self._cancel)
        self._submit(call, [prompt], GenerationParams.create(**params))
        return events

    async def agenerate(self, prompt: Prompt | Series[Prompt], **params: Any) -> Any:
        """`generate` for asynchronous callers; cancelling the task cancels the requests."""
        many = is_batch(prompt)
        prompts: list[Any] = list(prompt) if many else [prompt]
        events = AsyncTokenStream(call := Call(), self._aadvance, self._cancel)
        groups = self._submit(call, prompts, GenerationParams.create(**params))
        async for _ in events:
            pass
        results = [_gather(group) for group in groups]
        return results if many else results[0]

    def astream(self, prompt: Prompt, **params: Any) -> AsyncTokenStream:
        """`stream` for asynchronous callers."""
        events = AsyncTokenStream(call := Call(), self._aadvance, self._cancel)
        self._submit(call, [prompt], GenerationParams.create(**params))
        return events

    def take_events(self) -> EventLog:
        """The event log since the last call; the engine starts a new one."""
        taken: list[EventLog] = []
        self._alone(lambda: taken.append(self._scheduler.take_log()))
        return taken[0]

    def clear_prefixes(self) -> None:
        """Forget reusable prefixes (between the arms of a measurement)."""
        self._alone(self._scheduler.clear_prefixes)

    # -- inside -----------------------------------------------------------------------------------

    def _submit(self, call: Call, prompts: Series[Prompt], params: GenerationParams) -> list[list[Sequence]]:
        """Put samples of each prompt on their way; the iterator of `call`, made before, cancels if it is dropped."""
        drafter = self._settings.drafter if params.drafter is None else self._chosen(params.drafter)
        params = dataclasses.replace(params, drafter=drafter)
        groups = [self._make_sequences(self.encode(prompt), params) for prompt in prompts]
        for group in groups:
            for sequence in group:
                self._scheduler.check_fits(sequence)
        for group in groups:
            for sequence in group:
                sequence.join(call)
        try:
            for group in groups:
                for sequence in group:
                    self._scheduler.submit(sequence)
        except BaseException:
            self._cancel(call)
            raise
        return groups

    def _make_sequences(self, prompt_ids: list[int], params: GenerationParams) -> list[Sequence]:
        room = self.spec.max_context - len(prompt_ids)
        params = dataclasses.replace(params, max_new_tokens=min(params.max_new_tokens, room))
        for token in params.stop_ids:
            if token >= self.spec.vocab_size:
                raise OptionError(
                    f"stop_ids names token {token}; allowed: ids below {self.spec.vocab_size}, the vocabulary size"
                )
        end_ids = params.stop_ids if params.ignore_eos else params.stop_ids | self._model.eos_ids
        drafter = self._drafter(params.drafter or self._settings.drafter)
        seed = params.resolved_seed()
        sequences: list[Sequence] = []
        for index in range(params.n):
            sampler = Sampler(params.sampling, prompt_ids, end_ids, self.spec.vocab_size)
            stop = StopRules(
                Detokenizer(self.tokenizer), end_ids, params.stop, params.max_new_tokens, params.sampling.min_tokens
            )
            random = RequestRandom(seed, index)
            sequence = Sequence(next(self._ids), prompt_ids, params, sampler, stop, drafter, random)
            sequence.sibling = sequences[0] if sequences else None
            sequences.append(sequence)
        return sequences

    def _drafter(self, selection_text: str) -> Drafter:
        with self._making:
            drafter = self._drafters.get(selection_text)
            if drafter is None:
                drafter = self._drafters[selection_text] = self._make_drafter(selection_text)
        return drafter

    def _chosen(self, selection_text: str) -> str:
        """The drafter meant: the selection itself, or what a choice like `auto` makes of it for this target."""
        if selection_text in self._drafters:
            return selection_text
        selection = parse_selection(selection_text, DRAFTERS, "drafter")
        choice = load_class(selection)
        if not issubclass(choice, DrafterChoice):
            return selection_text
        options = read_options(choice.Options, selection.options, f"drafter {selection_text}")
        return choice.choose(options, self._target_info())

    def _make_drafter(self, selection_text: str) -> Drafter:
        selection_text = self._chosen(selection_text)
        selection = parse_selection(selection_text, DRAFTERS, "drafter")
        drafter_class = load_class(selection)
        if not issubclass(drafter_class, Drafter) or inspect.isabstract(drafter_class):
            raise OptionError(f"{selection.target} is not a Drafter with all its methods")
        options = read_options(drafter_class.Options, selection.options, f"drafter {selection_text}")
        return drafter_class.create(options, self._target_info())

    def _target_info(self) -> TargetInfo:
        return TargetInfo(
            vocab_size=self.spec.vocab_size,
            max_context=self.spec.max_context,
            eos_ids=self._model.eos_ids,
            tokenizer=self.tokenizer,
            load_model=self._load,
            make_drafter=self._make_drafter,
            backend=self._model.backend,
            name=self._model.name,
        )

    def _advance(self, call: Call) -> None:
        """Step once, unless another thread's step has brought something for this call meanwhile."""

        def step() -> None:
            if not self._guarded(self._scheduler.step) and not call.settled:
                raise AssertionError("a live sequence is in no queue")

        self._alone(step, unless=lambda: call.settled)

    async def _aadvance(self, call: Call) -> None:
        await asyncio.get_running_loop().run_in_executor(self._executor, self._advance, call)

    def _cancel(self, call: Call) -> None:
        """Let go of a call, without waiting: while a step runs, whoever runs it ends the call's sequences after it."""
        if call.num_live and not call.cancelled:
            # In this order: a call marked but not noted, by an interrupt in between, would neither run nor end.
            self._scheduler.note_cancelled(call)
            call.cancelled = True
            self._reap()

    def _alone(self, work: Callable[[], object], *, unless: Callable[[], bool] = lambda: False) -> None:
        """Do something to the scheduler while nobody else does."""
        try:
            self._turn.run(work, unless=unless)
        finally:
            self._reap()

    def _reap(self) -> None:
        while self._scheduler.has_cancelled and self._turn.try_run(lambda: self._guarded(self._scheduler.reap)):
            pass

    def _guarded(self, work: Callable[[], bool]) -> bool:
        """Do a piece of the scheduler's work. If it breaks off, those it concerned fail and the engine goes on."""
        try:
            return work()
        except Exception as error:  # each caller meets it in its own call
            self._scheduler.abort(error)
            return True
        except BaseException as error:  # an interrupt is its thread's own affair; others are told what happened
            interrupted = DraftsmithError(f"a step was interrupted ({type(error).__name__}) and its requests ended")
            interrupted.__cause__ = error
            self._scheduler.abort(interrupted)
            raise


def _gather(group: list[Sequence]) -> GenerationResult:
    results = [sequence.result() for sequence in group]
    return results[0] if len(results) == 1 else dataclasses.replace(results[0], samples=tuple(results))
