"""S of one population at every size that n_max is searched over, in the way that its sampler and evidence allow."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import takewhile

from probe_service.corpus import TrainingRows
from probe_service.estimate import (
    BorrowedCurve,
    Setting,
    ShareScan,
    exact_scan,
    scan_of_points,
    share_point,
)
from probe_service.measure.all_pairs import AllPairs, AllPairsInDetail, exact_limit
from probe_service.measure.batches import Batches
from probe_service.measure.draws import Draws, draws_for, ladder
from probe_service.measure.listed import SMALLEST_LISTED_SIZE, ListedCurve, PairListing
from probe_service.measure.scan import Scan
from probe_service.measure.task import Task
from probe_service.measure.terms import Softmaxes
from probe_service.schemas import SIMILARITY_THRESHOLDS, ProbeRequest, SamplerKind
from probe_service.scratch import Scratch
from probe_service.workspace import SHORTEST_SCAN, Population

__all__ = ["Shares"]


class Shares:
    """S over all sizes of one population.

    Random batches of in-batch candidates alone are looked at in all pairs where they can be, and in running sums over
    random orders beyond: every integer gets its S. Any other sampler, direction or hard negatives are measured on batches
    at a ladder of sizes.

    Args:
        population: The rows.
        sizes: Batch sizes asked for.
        request: What was asked.
        rows: The rows as a batch sampler sees them.
        borrowed: p(s) learnt elsewhere, for the scenario.
        scratch: Where results go.
        detailed: Whether all pairs are also to tell what remedies do and who brings the harm.
    """

    def __init__(
        self,
        population: Population,
        sizes: list[int],
        request: ProbeRequest,
        rows: Callable[[], TrainingRows],
        borrowed: BorrowedCurve | None,
        scratch: Scratch,
        *,
        detailed: bool = False,
    ) -> None:
        self.population, self._scratch, self._k = population, scratch, request.top_k
        plan, sampler, temperature = population.plan, request.sampler, request.temperature
        self.softmaxes = Softmaxes(
            population, request.loss, temperature=temperature, k=request.top_k, borrowed=borrowed
        )
        self.draws = draws_for(sampler, rows, plan)
        plain = self.softmaxes.plain and sampler.kind is SamplerKind.RANDOM
        devices = sampler.devices
        self.setting = Setting(
            evidence=population.evidence,
            plan=plan,
            thresholds=SIMILARITY_THRESHOLDS,
            ordered_pairs=population.positives is not None,
            plain=plain,
            complete=self.softmaxes.all_judged,
            devices=devices,
            inferred=self.softmaxes.chains,
            hard_negatives=population.hard_negatives is not None,
        )
        length = min(max(*sizes, SHORTEST_SCAN), plan.largest_size_with_interval)
        self.all_pairs: AllPairs | None = None
        self.listing: PairListing | None = None
        self._scan: Scan | None = None
        self._ladder: list[int] = []
        if plain:
            limit = exact_limit(plan, length, temperature) if request.method == "auto" else 0
            if limit:
                kind = AllPairsInDetail if detailed else AllPairs
                self.all_pairs = kind(population, sizes, limit, temperature=temperature, scratch=scratch)
                if detailed and max(sizes) >= SMALLEST_LISTED_SIZE:
                    self.listing = PairListing(population, scratch)
            if length > max(limit, 1) or not plan.whole_corpus:
                self._scan = Scan(
                    population, length, whole=length > limit, temperature=temperature, scratch=scratch
                )
        else:
            self._ladder = sorted({*ladder(length, devices), *(size for size in sizes if size <= length)})

    def batches(
        self, size: int, *, name: str | None = None, draws: Draws | None = None, shares_alone: bool = False
    ) -> Batches:
        """Batches of one size; by another sampler where `draws` says so, under a name of their own."""
        plan = self.population.plan
        return Batches(
            name or self.population.name,
            size,
            self.population.anchors.shape[1],
            draws or self.draws,
            self.softmaxes,
            plan,
            self._scratch,
            shares_alone=shares_alone,
            # The list gives the most similar pairs, which need all anchors of a batch; means over anchors do not.
            num_anchors=plan.num_anchors(size) if draws is None and self._is_listed(size) else None,
        )

    def listed_curve(self, size: int) -> ListedCurve | None:
        """The similarity curve at one size from the list of the most similar pairs; None where batches give it."""
        if self.listing is None or not self._is_listed(size):
            return None
        return ListedCurve(
            self.population, self.listing, size, self.softmaxes, k=self._k, scratch=self._scratch
        )

    def _is_listed(self, size: int) -> bool:
        return self.listing is not None and size >= SMALLEST_LISTED_SIZE

    def tasks(self, *, measured: Sequence[int] = ()) -> list[Task]:
        """What the search for n_max needs, but for batches of sizes that are measured anyhow."""
        tasks: list[Task] = [task for task in (self.all_pairs, self.listing, self._scan) if task is not None]
        return tasks + [
            self.batches(size, shares_alone=True) for size in self._ladder if size not in measured
        ]

    @cached_property
    def scan(self) -> ShareScan | None:
        """S at every size; None if too few rows were encoded for any interval."""
        complete = self.setting.complete
        exact = None if self.all_pairs is None else self.all_pairs.shares
        if self._scan is not None:
            return self._scan.result(exact)
        if exact is not None:
            return exact_scan(exact, complete=complete)
        steps = [self.batches(size) for size in self._ladder]
        # What the sampler cannot fill ends the search; so does it for all that is larger.
        possible = takewhile(lambda batches: batches.exist, steps)
        points = [share_point(batches.size, batches.result(), self.setting) for batches in possible]
        return scan_of_points(points, complete=complete)
