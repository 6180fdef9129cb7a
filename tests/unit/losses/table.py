"""The smallest model that the losses can train: it looks its vectors up, and gives what a data collator would give."""

from __future__ import annotations

import torch


class Table(torch.nn.Module):
    """Row r of every column c of a batch is row c·size + r of the table."""

    def __init__(self, size, columns, dimension=6, seed=0):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        drawn = torch.randn(columns, size, dimension, generator=generator, dtype=torch.float64)
        drawn[1] = drawn[0] + 0.5 * drawn[1]  # positives are near their anchors
        self.weight = torch.nn.Parameter(drawn.reshape(columns * size, dimension))
        self.size, self.columns = size, columns

    def forward(self, features):
        return {"sentence_embedding": self.weight[features["input_ids"][:, 0]]}

    def __getitem__(self, _place):
        return self

    def vectors(self):
        """(columns, size, d) numpy, for oracles."""
        return self.weight.detach().numpy().reshape(self.columns, self.size, -1)

    def features(self, rows=slice(None)):
        numbers = torch.arange(self.columns * self.size).reshape(self.columns, self.size)[:, rows]
        mask = torch.ones(numbers.shape[1], 1, dtype=torch.int64)
        return [{"input_ids": column[:, None], "attention_mask": mask} for column in numbers]


def value_and_gradient(loss, table, labels=None, seed=0):
    """Loss and (rows, d) gradient of one step, from a known state of torch's generator."""
    table.weight.grad = None
    torch.manual_seed(seed)
    value = loss(table.features(), labels)
    value.backward()
    return value.detach(), table.weight.grad.clone()
