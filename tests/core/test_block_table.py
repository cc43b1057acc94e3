"""Rows of the block table: what the device is told of them, and when they are free again."""

import numpy as np

from core.block_table import BlockTable


def rows(*values):
    return np.array(values, np.int32)


def test_the_device_is_told_of_every_entry_once():
    table = BlockTable(num_rows=2, max_pages=4)
    row = table.open(rows(7, 9))
    assert table.updates(rows(row), rows(2)).tolist() == [[row, 0, 7], [row, 1, 9]]
    table.pages[row, 2] = 5
    assert table.updates(rows(row), rows(3)).tolist() == [[row, 2, 5]]
    assert table.updates(rows(row), rows(3)).shape == (0, 3)


def test_a_row_is_free_once_no_launch_in_flight_uses_it():
    table = BlockTable(num_rows=1, max_pages=4)
    row = table.open(rows(1))
    table.launched(3, rows(row))
    table.retire(row)
    assert table.in_use == 1
    table.collected(2)
    assert table.in_use == 1
    table.collected(3)
    assert table.in_use == 0
    assert table.open(rows(8)) == row
    assert table.updates(rows(row), rows(1)).tolist() == [[row, 0, 8]]
