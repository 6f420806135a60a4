"""What the drafter tests run on: Markov decoders, letter tokenizers, and an engine of twenty lines.

`TableBackend` is a decoder whose logits depend on the last token alone, with a real KV cache. `run` drives
one or more sequences through a drafter, `core.verify` and the caches, budgets as the test says.
"""

from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import torch

from draftsmith.core.random import RequestRandom
from draftsmith.core.sampling import Sampler, SamplingParams
from draftsmith.core.tree import validate
from draftsmith.core.types import Proposal, ProposalKind
from draftsmith.core.verify import verify
from draftsmith.core.view import SequenceView
from draftsmith.drafters.base import Commit, Drafter, TargetInfo
from draftsmith.models.backend import Backend, RowGroup, Scored
from draftsmith.models.kv_cache import KVCache
from draftsmith.registry import DRAFTERS, load_class, parse_selection, read_options
from tests.drafters import trained
from tests.models.fakes import tiny_spec


class LetterTokenizer:
    """One token per piece of text; longest piece first. Pieces written `<...>` are special."""

    add_bos = False
    bos_id = None

    def __init__(self, pieces):
        self.pieces = list(pieces)
        self.vocab_size = len(self.pieces)
        self.eos_ids = frozenset(token for token, piece in enumerate(self.pieces) if piece == "<end>")

    def is_special(self, token):
        return self.pieces[token].startswith("<")

    def token_text(self, token):
        return self.pieces[token]

    def token_bytes(self, token):
        return b"" if self.is_special(token) else self.pieces[token].encode()

    def normalized_token_text(self, token):
        return ("\0" if self.is_special(token) else "") + self.pieces[token]

    def encode(self, text, *, special):
        ids = []
        while text:
            best = max((piece for piece in self.pieces if text.startswith(piece)), key=len, default=None)
            if best is not None:
                ids.append(self.pieces.index(best))
            text = text[len(best) if best else 1 :]
        return ids


class TableBackend(Backend):
    """A Markov decoder: the logits of a row are `table[token]`, float64 [V, V]."""

    def __init__(self, table, max_context=4096):
        self.table = torch.as_tensor(np.asarray(table), dtype=torch.float64)
        self.spec = tiny_spec(
            vocab_size=len(self.table), width=len(self.table), num_layers=1, num_heads=1, num_kv_heads=1, head_dim=2,
            mlp_width=2, max_context=max_context,
        )  # fmt: skip
        self.cache = KVCache(self.spec, dtype=torch.float32, device=torch.device("cpu"))
        self.calls = []

    def score(self, groups, taps=frozenset()):
        self.calls.append([len(group.tokens) for group in groups])
        logits, features = [], []
        for group in groups:
            assert self.cache.committed(group.sequence_id) + len(group.tokens) <= self.spec.max_context + 64
            self.cache.append(group.sequence_id, group.tokens, group.parents)
            logits.append(self.table[list(group.tokens[group.first_logit :])])
            tokens = torch.tensor(list(group.tokens))
            features.append({tap: self.hidden(tap, tokens) for tap in taps})
        return Scored(logits=logits, taps=features)

    def hidden(self, tap, tokens):
        """Before the final norm the token itself, after it what the head makes the logits of."""
        return self.table[tokens].float() if tap == "last_hidden" else self.embed(tokens)

    def embed(self, tokens):
        return torch.eye(self.spec.vocab_size)[tokens]

    def head_rows(self, tokens):
        return torch.eye(self.spec.vocab_size)[tokens]

    @property
    def weight_bytes(self):
        return self.table.nbytes


def random_table(vocab_size, seed, sharpness=1.5):
    """Logits of a random Markov decoder."""
    return sharpness * np.random.default_rng(seed).normal(size=(vocab_size, vocab_size))


def near_table(table, seed, noise=0.3):
    """A decoder that resembles another."""
    return np.asarray(table) + noise * np.random.default_rng(seed).normal(size=np.shape(table))


VOCAB = 12
LETTERS = LetterTokenizer(["a", "b", "c", "d", "e", "f", "g", "h", "i", "j", "k", "<end>"])
TABLE = random_table(VOCAB, 0)


def target_info(models=None, tokenizer=LETTERS, vocab_size=VOCAB, eos_ids=frozenset(), max_context=4096):
    """A target whose other models are `models`: name -> object with `backend` and `tokenizer`."""
    if models is None:
        models = {"near": loaded(near_table(TABLE, 1))}

    def load_model(name):
        if name == "student":
            return SimpleNamespace(backend=trained.toy_student().writer(), tokenizer=tokenizer)
        return models[name]

    info = TargetInfo(
        vocab_size=vocab_size,
        max_context=max_context,
        eos_ids=eos_ids,
        tokenizer=tokenizer,
        load_model=load_model,
        make_drafter=lambda text: make(text, info),
        backend=TableBackend(TABLE),
    )
    return info


def texts_of(backend, count, length, seed, temperature=0.4):
    """Texts a Markov decoder would write; rather cold, so that the likeliest continuations are well known."""
    noise = torch.Generator().manual_seed(seed)
    texts = [[index % backend.spec.vocab_size] for index in range(count)]
    for text in texts:
        while len(text) < length:
            law = torch.softmax(backend.table[text[-1]] / temperature, dim=-1)
            text.append(int(torch.multinomial(law, 1, generator=noise)))
    return texts


def target_of(backend, eos_ids=frozenset()):
    """What a drafter is told of a backend without a tokenizer."""
    return TargetInfo(
        vocab_size=backend.spec.vocab_size,
        max_context=backend.spec.max_context,
        eos_ids=eos_ids,
        tokenizer=None,
        load_model=None,
        make_drafter=None,
        backend=backend,
    )


def loaded(table, tokenizer=LETTERS, **spec):
    """What `TargetInfo.load_model` returns."""
    return SimpleNamespace(backend=TableBackend(table, **spec), tokenizer=tokenizer)


def make(text, info=None):
    """The drafter a selection names; `path=toy/NAME` is a checkpoint of `trained.py`."""
    text = trained.resolved(text)
    selection = parse_selection(text, DRAFTERS, "drafter")
    drafter_class = load_class(selection)
    return drafter_class.create(read_options(drafter_class.Options, selection.options, text), info or target_info())


class Reading:
    """A drafter that hears all rows of the toy target before it is asked, as it would from an engine."""

    def __init__(self, text):
        self.drafter = make(text)
        self.backend = TableBackend(TABLE)

    def read(self, view):
        if view.sequence_id not in self.backend.cache:
            self.backend.cache.open(view.sequence_id)
        read_prompt(self.backend, self.drafter, view)

    def propose(self, views, budgets, keep_drafting=lambda confidence: True):
        for view in views:
            self.read(view)
        return self.drafter.propose(views, budgets, keep_drafting)

    def fork(self, source, copy, length):
        self.drafter.fork(source, copy, length)
        self.backend.cache.fork(source, copy, self.backend.cache.reusable_len(source, length))

    def truncate(self, sequence_id, length):
        self.drafter.truncate(sequence_id, length)
        cache = self.backend.cache
        cache.truncate(sequence_id, cache.reusable_len(sequence_id, length))

    def forget(self, sequence_id):
        self.drafter.forget(sequence_id)
        self.backend.cache.close(sequence_id)


def view_of(tokens, prompt_len=None, sequence_id=0, seed=0, params=None, vocab_size=VOCAB, end_ids=frozenset()):
    """A view of a sequence with its sampler caught up."""
    prompt_len = len(tokens) if prompt_len is None else prompt_len
    sampler = Sampler(params or SamplingParams(), tokens[:prompt_len], end_ids, vocab_size)
    sampler.append(tokens[prompt_len:])
    return SequenceView(sequence_id, list(tokens), prompt_len, sampler, RequestRandom(seed))


def always(confidence):
    """A `keep_drafting` that never stops."""
    return True


def check_proposal(proposal, view, budget, vocab_size=VOCAB):
    """The contract of one proposal."""
    assert isinstance(proposal, Proposal)
    tree = proposal.tree
    validate(tree)
    assert tree.tokens[0] == view.root
    assert tree.num_drafted <= budget
    assert all(0 <= token < vocab_size for token in tree.tokens)
    if proposal.confidence is not None:
        assert len(proposal.confidence) == tree.num_nodes
        assert all(0.0 <= value <= 1.0 + 1e-12 for value in proposal.confidence)
    if proposal.kind is ProposalKind.POINT_MASS:
        assert not proposal.laws
        assert len({(parent, token) for parent, token in zip(tree.parents, tree.tokens, strict=True)}) == len(
            tree.tokens
        )
    else:
        assert set(proposal.laws) >= set(tree.parents[1:])
        for law in proposal.laws.values():
            assert abs(float(law.probs.sum()) - 1) < 1e-5


@dataclass
class Run:
    """Emitted tokens per sequence, and how much was drafted and accepted."""

    emitted: dict[int, list[int]]
    drafted: int = 0
    accepted: int = 0
    proposals: list[Proposal] = field(default_factory=list)


def run(
    target,
    drafter,
    prompts,
    limit,
    params=None,
    budget=lambda step: 4,
    seed=0,
    keep_drafting=always,
    end_ids=frozenset(),
):
    """Generate `limit` tokens for every prompt as one batch; sequence i has id i and seed `seed + i`.

    `budget(step)`: nodes per sequence in a step, 0 leaves the drafter alone.
    """
    params = params or SamplingParams()
    vocab_size = target.spec.vocab_size
    views = {
        index: view_of(
            prompt, sequence_id=index, seed=seed + index, params=params, vocab_size=vocab_size, end_ids=end_ids
        )
        for index, prompt in enumerate(prompts)
    }
    result = Run({index: [] for index in views})
    for view in views.values():
        target.cache.open(view.sequence_id)
        read_prompt(target, drafter, view)
    for step in range(10 * limit):
        live = [view for index, view in views.items() if len(result.emitted[index]) < limit]
        if not live:
            break
        one_step(target, drafter, live, budget(step), limit, keep_drafting, result)
    for index in views:
        target.cache.close(index)
        drafter.forget(index)
    return result


def read_prompt(target, drafter, view, chunk_rows=5):
    """Score all known tokens but the root and what is scored already, in chunks the drafter hears of."""
    while (start := target.cache.committed(view.sequence_id)) < len(view.tokens) - 1:
        known = view.tokens[start : min(start + chunk_rows, len(view.tokens) - 1)]
        target.cache.reserve(view.sequence_id, len(known))
        group = RowGroup(view.sequence_id, known, range(-1, len(known) - 1), len(known))
        scored = target.score([group], drafter.needs)
        target.cache.keep(view.sequence_id, range(len(known)))
        drafter.commit([Commit(view, None, scored.taps[0])])


def one_step(target, drafter, live, budget, limit, keep_drafting, result):
    """Draft, score, verify, keep, commit."""
    budgets = [min(budget, limit - len(result.emitted[view.sequence_id]) - 1) for view in live]
    asked = [place for place, value in enumerate(budgets) if value > 0]
    proposals = [Proposal.empty(view.root) for view in live]
    if asked:
        found = drafter.propose([live[place] for place in asked], [budgets[place] for place in asked], keep_drafting)
        assert len(found) == len(asked)
        for place, proposal in zip(asked, found, strict=True):
            check_proposal(proposal, live[place], budgets[place], target.spec.vocab_size)
            proposals[place] = proposal
    groups = []
    for view, proposal in zip(live, proposals, strict=True):
        target.cache.reserve(view.sequence_id, proposal.tree.num_nodes)
        groups.append(RowGroup(view.sequence_id, proposal.tree.tokens, proposal.tree.parents, 0))
    commits = []
    scored = target.score(groups, drafter.needs)
    for view, proposal, logits_TV, taps in zip(live, proposals, scored.logits, scored.taps, strict=True):
        verdict = verify(proposal, logits_TV, view.sampler, view.random, view.position)
        verdict = verdict.cut(limit - len(result.emitted[view.sequence_id]))
        kept = [0, *verdict.path[: verdict.num_emitted - 1]]
        target.cache.keep(view.sequence_id, kept)
        view.tokens.extend(verdict.tokens)
        view.sampler.append(verdict.tokens)
        result.emitted[view.sequence_id].extend(verdict.tokens)
        result.drafted += proposal.tree.num_drafted
        result.accepted += verdict.num_accepted
        result.proposals.append(proposal)
        commits.append(Commit(view, verdict, {tap: rows[kept] for tap, rows in taps.items()}))
    drafter.commit(commits)


class EchoDrafter(Drafter):
    """A drafter from outside the table: proposes the root again and again."""

    @classmethod
    def create(cls, options, target):
        return cls()

    def propose(self, views, budgets, keep_drafting):
        from draftsmith.core.tree import chain

        return [Proposal(chain(view.root, [view.root] * budget)) for view, budget in zip(views, budgets, strict=True)]

    def forget(self, sequence_id):
        pass
