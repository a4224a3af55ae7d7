"""How many drafts were accepted, by their place in a step (chapter 50)."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass
class SpecStats:
    """Counts of drafts (ATOM's name), per sequence and decode step."""

    num_steps: int = 0
    num_tokens: int = 0  # generated in these steps
    proposed: Counter[int] = field(default_factory=Counter)  # by place, from 0
    accepted: Counter[int] = field(default_factory=Counter)
    histogram: Counter[int] = field(default_factory=Counter)  # accepted -> steps

    def record(self, drafted: int, accepted: int, num_tokens: int) -> None:
        """Count one sequence's part in a step."""
        self.num_steps += 1
        self.num_tokens += num_tokens
        self.histogram[accepted] += 1
        for i in range(drafted):
            self.proposed[i] += 1
            self.accepted[i] += i < accepted

    def record_plain(self, num_seqs: int) -> None:
        """Count a step without drafts, of so many sequences."""
        self.num_steps += num_seqs
        self.num_tokens += num_seqs
        self.histogram[0] += num_seqs

    @property
    def tokens_per_step(self) -> float:
        """Mean number of tokens per sequence and decode step; 0 without steps."""
        return self.num_tokens / (self.num_steps or 1)

    @property
    def acceptance(self) -> list[float]:
        """Share of the drafts in each place that were accepted."""
        return [self.accepted[i] / self.proposed[i] for i in sorted(self.proposed)]
