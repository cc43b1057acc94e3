"""Replicas on several nodes: a Ray cluster of two, which happen to be on this machine."""

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from experiments.serving.chaos import TINY, all_of, is_back, model, wait_for_ready, workers
from experiments.serving.sampled_client import Asked
from experiments.serving.server_process import ServerProcess, serving
from tests.plugins.mode.replicas.test_ray import until

pytestmark = [
    pytest.mark.live,
    pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs /proc"),
]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """One CPU a node: a replica takes all of one."""
    from ray.cluster_utils import Cluster

    node = {"num_cpus": 1, "object_store_memory": 128 << 20, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=node)
    try:
        cluster.add_node(num_cpus=1, object_store_memory=128 << 20)
        yield cluster
    finally:
        cluster.shutdown()


@pytest.fixture(scope="module")
def server(cluster: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    options = ("replicas=2", "+router=round_robin", f"ray.address={cluster.address}")
    with serving(tmp_path_factory.mktemp("nodes"), *TINY, *options) as server:
        wait_for_ready(server, 2)
        yield server


def raylets(cluster: Any) -> set[int]:
    """Process ids of the nodes' raylets."""
    return {node.all_processes["raylet"][0].process.pid for node in cluster.list_all_nodes()}


def parent(process: int) -> int:
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return int(fields[1])


def nodes_of(server: ServerProcess) -> list[int]:
    """The raylet that started each replica."""
    return [parent(line["process_id"]) for line in workers(server)]


def test_each_node_has_a_replica_and_both_serve(cluster: Any, server: ServerProcess) -> None:
    assert set(nodes_of(server)) == raylets(cluster)
    assert len(set(nodes_of(server))) == 2
    asked = [Asked(number, 40, 128) for number in range(8)]
    got = asyncio.run(all_of(server.port, asked, model(server), 8))
    assert [one.fault for one in got if one.fault] == []
    assert all(line["report"]["number"] > 1 for line in workers(server))


def test_a_replica_that_is_killed_comes_back_on_a_node_of_the_cluster(
    cluster: Any, server: ServerProcess
) -> None:
    line = workers(server)[0]
    os.kill(line["process_id"], 9)
    until(lambda: is_back(server, line))
    assert set(nodes_of(server)) == raylets(cluster)
