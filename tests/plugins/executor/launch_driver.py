"""Builds launches by hand as the core would."""

import numpy as np

from core.launch import Launch, PoolLayout, RowSetup
from core.request import SamplingParams

GREEDY = SamplingParams(temperature=0)


class Driver:
    """Plays the core for an executor: rows, pages in random order, known tokens. `outputs[row]`
    grows at collect; `step` launches and collects, `launch` leaves the launch in flight.
    alter(launch): breaks one."""

    def __init__(self, executor, page_size=16, num_rows=8, num_tokens=1024, seed=0):
        self.executor, self.page_size = executor, page_size
        num_pages = num_tokens // page_size
        self.layout = PoolLayout(num_pages + 1, page_size, num_rows, num_pages, 2048)
        executor.prepare(self.layout)
        self.free = (np.random.default_rng(seed).permutation(num_pages) + 1).tolist()
        self.known, self.in_flight, self.computed, self.prompt_len = {}, {}, {}, {}
        self.outputs, self.pages, self.setups, self.results = {}, {}, {}, []
        self.next_id, self.sampling, self.alter = 0, [], None

    def start(self, row, prompt, params=GREEDY, seed=0, choice=0, ends=(), outputs=()):
        """A new sequence in a row, or one that resumes with `outputs`."""
        tokens = np.array([*prompt, *outputs], np.int32)
        self.setups[row] = RowSetup(row, params, len(prompt), tokens, seed, choice, tuple(ends))
        self.known[row], self.in_flight[row] = tokens.tolist(), 0
        self.computed[row], self.prompt_len[row] = 0, len(prompt)
        self.outputs[row], self.pages[row] = list(outputs), []

    def release(self, row):
        """Give a row's pages back."""
        self.free.extend(self.pages.pop(row))

    def launch(self, *parts):
        """parts: (row, num_tokens). Only launched tokens count as computed; feedback where
        needed."""
        parts = sorted(parts, key=lambda part: part[1] > 1)
        ids, feedback, samples, updates, tokens = [], [], [], [], []
        for row, count in parts:
            first = self.computed[row]
            end = first + count
            known = self.known[row]
            ids.append(first)
            feedback.append(end > len(known))
            samples.append(end == len(known) + self.in_flight[row])
            tokens += [*known[first:end], 0][:count]
            while len(self.pages[row]) * self.page_size < end:
                updates.append((row, len(self.pages[row]), self.free.pop()))
                self.pages[row].append(updates[-1][2])
            self.computed[row] = end
            self.in_flight[row] += samples[-1]
        launch = Launch(
            launch_id=self.next_id,
            row_ids=np.array([row for row, _ in parts], np.int32),
            first_positions=np.array(ids, np.int32),
            num_tokens=np.array([count for _, count in parts], np.int32),
            token_ids=np.array(tokens, np.int32),
            feedback=np.array(feedback, np.bool_),
            samples=np.array(samples, np.bool_),
            num_decode_rows=sum(count == 1 for _, count in parts),
            table_updates=np.array(updates, np.int32).reshape(-1, 3),
            setups=tuple(self.setups.pop(row) for row, _ in parts if row in self.setups),
        )
        self.next_id += 1
        self.sampling.append([row for (row, _), one in zip(parts, samples, strict=True) if one])
        self.executor.launch(self.alter(launch) if self.alter else launch)
        return launch

    def collect(self):
        """The oldest launch's result; its tokens become known."""
        result = self.executor.collect()
        self.results.append(result)
        for row, token in zip(self.sampling.pop(0), result.tokens.tolist(), strict=True):
            self.known[row].append(token)
            self.outputs[row].append(token)
            self.in_flight[row] -= 1
        return result

    def step(self, *parts):
        self.launch(*parts)
        return self.collect()

    def run(self, row, num_tokens, chunk=None):
        """Compute a row's known tokens in chunks, then decode until it has `num_tokens` outputs."""
        while (left := len(self.known[row]) - self.computed[row]) > 1 or not self.outputs[row]:
            self.step((row, min(left, chunk or left)))
        while len(self.outputs[row]) < num_tokens:
            self.step((row, 1))
        return self.outputs[row]
