"""A drafter's versions in a run: published as a whole, told apart by checksums, tried by a canary.

The match rule keeps tokens right whatever drafts, so a drafter that is dead shows in nothing but
time. Here a fault gets a name before the next rollout, and the last good version drafts again; if
that does not help, nothing is drafted until a good one is published.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from specrl_jax.draft import eagle_model
from specrl_jax.io.checksum import checksum, sums
from specrl_jax.rollout.sampler import Sampler

KNOWN = 16  # versions whose fingerprints are kept
SHARE = 0.5  # of the accepted drafts that earlier canaries let expect: fewer are a dead drafter's
FADE = 0.9  # what a canary expects of the rate before, at least: actors change, and so may it
EVIDENCE = 12  # accepted drafts to expect of a canary: of 4 or fewer a dead drafter is not told
MOST_ANSWERS = 8  # of a canary, where the batch has fewer rows
NOT_FINITE, ZEROED, SWAPPED, SHUFFLED = "not finite", "zeroed", "swapped", "shuffled"
STALE, SKIPPED, VOCABULARY, SILENT = "stale", "skipped publish", "vocabulary map", "dead canary"


@dataclasses.dataclass(frozen=True)
class Fingerprint:
    """What tells two trees of equal shapes apart; sums are modulo 2^32."""

    bag: int  # of all bits: the same for the same values in another order
    checksum: int  # of all bits, each weighted by its place
    vocab: int  # checksum of the draft vocabulary
    finite: bool
    zero: bool

    @property
    def fault(self) -> str:
        """What is wrong with it, whatever it should be; "" if nothing is."""
        return NOT_FINITE if not self.finite else ZEROED if self.zero else ""


@jax.jit
def _cast(weights: Any, like: Any) -> Any:
    return jax.tree.map(lambda a, b: a.astype(b.dtype), weights, like)


def fingerprint(weights: Any, vocab: Any) -> Fingerprint:
    bag, total, finite, zero = sums(weights)
    return Fingerprint(int(bag), int(total), checksum((vocab,)), bool(finite), bool(zero))


def name_fault(found: Fingerprint, wanted: Fingerprint, known: dict[int, Fingerprint]) -> str:
    """What is wrong with a drafter, by name; "" if nothing is.

    Args:
      found: what is there.
      wanted: what was published last.
      known: fingerprints of earlier versions.
    """
    if found == wanted:
        return ""
    if not found.finite:
        return NOT_FINITE
    if found.zero and not wanted.zero:
        return ZEROED
    if found.checksum == wanted.checksum:
        return VOCABULARY
    if any(found.checksum == old.checksum for old in known.values()):
        return STALE
    return SHUFFLED if found.bag == wanted.bag else SWAPPED


class Life:
    """Which version drafts, and whether it is what was published.

    Args:
      sampler: its drafter has weights.
      prompts: token ids; the first few are the canary's.
      canary: tokens of each of its answers; 0 is no canary.
      warn: told of faults.
    """

    def __init__(self, sampler: Sampler, prompts: Sequence[Sequence[int]], canary: int,
                 warn: Callable[[str], None]) -> None:
        self.sampler, self._prompts, self._tokens, self._warn = sampler, prompts, canary, warn
        self.version = sampler.drafter_version
        self._known: dict[int, Fingerprint] = {}
        self._good: Any = None  # the last version that passed
        self._others: Fingerprint | None = None  # of small models beside the head
        self._rate = 0.0  # accepted drafts of a row's round that a canary should hear
        self.held = False  # nothing is drafted
        self.faults = 0
        self.seconds = np.zeros(2)  # spent on versions and training; saved by speculation
        self._rows = jax.jit(lambda actor, vocab: sums(
            (eagle_model.draft_head(sampler.drafting.head, actor, vocab),))[1])

    @property
    def head(self) -> Any:
        """What was published last: {"weights", "vocab"}, or a small model's weights."""
        return self.sampler.drafting.kept(self.sampler.own)

    def begin(self) -> None:
        """Takes what the sampler drafts with for the first version, unless one was restored.

        Whatever is used later is compiled here.
        """
        checksum(self.head)
        self._others = self._beside()
        if self._known:
            if self._dead_beside and not self.held:
                self._hold(self._dead_beside)
            self._look(), self._listen()
            return
        self._good = self.sampler.own
        self._known = {self.version: self._print(self.head)}
        fault = self._known[self.version].fault or self._dead_beside
        if fault:
            self._hold(fault)
        self._look()
        if self._tokens:
            accepted, rounds, broken = self._listen()
            self._rate = _rate(accepted, rounds)
            if broken and not fault:
                self._hold(NOT_FINITE)

    def _print(self, head: Any) -> Fingerprint:
        """Of a head in the rollout's dtype."""
        drafting = self.sampler.drafting
        like, _ = drafting.weights(drafting.kept(self.sampler.drafter_params))
        weights, vocab = drafting.weights(head)
        return fingerprint(_cast(weights, like), vocab)

    def _beside(self) -> Fingerprint | None:
        """Of what drafts beside the head; None where nothing does."""
        others = self.sampler.drafting.others(self.sampler.drafter_params)
        return fingerprint(others, ()) if others else None

    @property
    def _dead_beside(self) -> str:
        """What was wrong with it when the run began: no new version of the head mends that."""
        return self._others.fault if self._others else ""

    # Before a rollout.

    def inspect(self) -> str:
        """Compares what the next rollout would draft with to what was published; repairs it.

        Returns:
          the fault's name, or "".
        """
        fault = self._look()
        if fault and not self.held:
            self.report(f"drafter version {self.version}: {fault}; publishing the last good "
                        f"version again")
            self.sampler.publish_drafter(self._good, self.version)
            if self._look():
                self._hold(fault)
        return fault

    def _look(self) -> str:
        sampler, drafting = self.sampler, self.sampler.drafting
        bound, wanted = map(drafting.kept, (sampler.drafter_params, self._good))
        weights, vocab = drafting.weights(bound)
        if _shapes(weights) != _shapes(drafting.weights(wanted)[0]):
            return SWAPPED
        found = fingerprint(weights, vocab)
        older = {v: known for v, known in self._known.items() if v != self.version}
        fault = name_fault(found, self._known[self.version], older)
        fault = fault or (VOCABULARY if self._scores_others(bound) else "")
        if not fault and self._others:
            fault = name_fault(self._beside(), self._others, {})
        late = sampler.drafter_version != self.version
        return SKIPPED if late and fault in ("", STALE) else fault

    def _scores_others(self, bound: Any) -> bool:
        """Whether the actor's rows that score drafts are not those of the draft vocabulary."""
        arch, actor = self.sampler.drafting.head, self.sampler.params
        if arch is None or bound.head is None:  # the drafter has its own
            return False
        if arch.draft_vocab == arch.actor.vocab_size:  # the actor's as they are
            return bound.head is not eagle_model.draft_head(arch, actor, bound.vocab)
        return int(self._rows(actor, bound.vocab)) != checksum((bound.head,))

    # After an update.

    def damage(self, head: Any) -> str:
        """What happened to the learner's head since it was published; "" if nothing did."""
        older = {v: known for v, known in self._known.items() if v != self.version}
        return name_fault(self._print(head), self._known[self.version], older)

    def publish(self, head: Any, learned: bool = True) -> str:
        """Makes `head` the next version, unless something is wrong with it or the canary is dead.

        Args:
          learned: whether any of its updates was finite; else it is the version before.

        Returns:
          the fault's name, or "". With a fault the version before drafts on.
        """
        found, last = self._print(head), self._known[self.version]
        fault = found.fault or (NOT_FINITE if not learned else
                                VOCABULARY if found.vocab != last.vocab else "")
        sampler = self.sampler
        own = sampler.drafting.with_kept(self._good, head)
        if not fault:
            sampler.publish_drafter(own, self.version + 1)
            fault = self._try()
        if fault:
            self.report(f"drafter version {self.version + 1}: {fault}; version {self.version} "
                        f"drafts on")
            sampler.publish_drafter(self._good, self.version)
            return fault
        self.version, self._good = self.version + 1, own
        self._known[self.version] = found
        self._known = dict(list(self._known.items())[-KNOWN:])
        if (self.held or sampler.broken) and not self._dead_beside:
            self.held = sampler.broken = False
            sampler.draft_to(None)
        return ""

    def _try(self) -> str:
        """The canary: few accepted drafts where versions before had many are a fault."""
        if not self._tokens:
            return ""
        accepted, rounds, broken = self._listen()
        if broken:
            return NOT_FINITE
        expected = rounds * self._rate
        if accepted < SHARE * expected - expected**0.5:
            return SILENT
        self._rate = max(_rate(accepted, rounds), FADE * self._rate)
        return ""

    def _listen(self) -> tuple[int, int, int]:
        """The head's own accepted drafts, row-rounds, and drafts whose scores were not finite.

        Of as many answers as EVIDENCE takes. A dead drafter takes a round for each token.
        """
        shapes, drafting = self.sampler.engine.shapes, self.sampler.drafting
        wanted = math.ceil(EVIDENCE / max(self._tokens * self._rate * shapes.shards, 1e-9))
        answers = max(shapes.batch, min(wanted, MOST_ANSWERS))
        live = np.arange(shapes.sequences) < answers
        limit = np.tile(np.where(live, self._tokens, 0), shapes.shards).astype(np.int32)
        heard = self.sampler.canary(self._prompts, limit, shapes.depth)
        name = drafting.drafter.names[drafting.part or 0]
        return (heard.by_drafter[name]["accepted"], heard.counters["row_rounds"],
                heard.counters["broken"])

    # The account.

    def account(self, spent: float, saved: float) -> dict[str, float]:
        """Adds a step's seconds: on the drafter's versions and training, and by speculation."""
        self.seconds += (spent, saved)
        net = float(self.seconds[1] - self.seconds[0])
        return {"time/distill": spent, "time/speculation_net": net}

    def report(self, text: str) -> None:
        """Counts a fault, and says what it is."""
        self.faults += 1
        self._warn(text)

    def silence(self) -> None:
        """Takes note that a rollout switched drafting off, see Sampler.generate."""
        self.faults += 1
        self.held = True

    def _hold(self, fault: str) -> None:
        self._warn(f"drafter version {self.version}: {fault}; nothing is drafted until a good "
                   f"version is published")
        self.held = True
        self.sampler.draft_to(0)

    # Persistence.

    def meta(self) -> dict[str, Any]:
        return {"version": self.version, "held": self.held, "faults": self.faults,
                "rate": self._rate,
                "known": [[v, *dataclasses.astuple(known)] for v, known in self._known.items()]}

    def restore(self, meta: dict[str, Any], head: Any = None) -> None:
        """Continues with `head`, the published version of a checkpoint.

        Without one, as of drafters that do not learn, with what the sampler has loaded: a new
        version, if its file was replaced meanwhile.
        """
        self.version, self.held, self.faults = meta["version"], meta["held"], meta["faults"]
        self._rate = meta["rate"]
        self._known = {v: Fingerprint(*rest) for v, *rest in meta["known"]}
        if head is None:
            head = self.head
            loaded = self._print(head)
            if loaded != self._known[self.version]:
                self.version += 1
                self._known[self.version] = loaded
                field = "model" if self.sampler.drafting.head is None else "path"
                self._warn(f"draft.{field} holds other weights than when this run was left: "
                           f"drafter version {self.version}")
                if loaded.fault:
                    self._hold(loaded.fault)
                elif self.held:
                    self.held = False
                    self.sampler.draft_to(None)
        self._good = self.sampler.drafting.with_kept(self.sampler.own, head)
        self.sampler.publish_drafter(self._good, self.version)


def _rate(accepted: int, rounds: int) -> float:
    return accepted / max(rounds, 1)


def _shapes(tree: Any) -> Any:
    return jax.tree.map(lambda a: a.shape, tree)
