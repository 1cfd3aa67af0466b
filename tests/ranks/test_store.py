"""On which interfaces the rendezvous store listens."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import psutil
import pytest
from torch._C._distributed_c10d import HashStore

from ddlbench.ranks.launch import listen, open_store
from ddlbench.ranks.launchers import Launch, free_port

WITHIN = timedelta(seconds=60)


def ranks(address: str, port: int) -> list[Launch]:
    return [Launch("srun", rank, 2, rank, 2, 1, address, port) for rank in range(2)]


def listening(port: int) -> set[str]:
    """Addresses at which this process listens."""
    result = psutil.Process().net_connections("tcp")
    return {each.laddr.ip for each in result if each.status == psutil.CONN_LISTEN and each.laddr.port == port}


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.0.9"])
def test_it_listens_at_the_address_that_the_ranks_are_given_and_nowhere_else(address: str) -> None:
    port = free_port()
    with ThreadPoolExecutor() as pool:  # each waits for the other
        first, second = pool.map(lambda launch: open_store(launch, WITHIN, {}), ranks(address, port))
    assert listening(port) == {address}
    first.set("key", "value")
    assert second.get("key") == b"value"


def test_for_the_name_of_a_host_it_listens_everywhere() -> None:
    port = free_port()
    held = open_store(ranks("localhost", port)[0], WITHIN, {})
    assert listening(port) <= {"::", "0.0.0.0"}
    assert len(listening(port)) == 1
    del held


def test_rank_0_waits_for_no_other_rank_and_opens_none_where_torchrun_has_one() -> None:
    port = free_port()
    held = open_store(ranks("127.0.0.1", port)[0], WITHIN, {})
    client = open_store(ranks("127.0.0.1", port)[0], WITHIN, {"TORCHELASTIC_USE_AGENT_STORE": "True"})
    client.set("key", "value")
    assert held.get("key") == b"value"


def test_one_process_needs_no_network() -> None:
    assert isinstance(open_store(Launch("alone"), WITHIN, {}), HashStore)


def test_an_address_of_another_machine_or_a_taken_port_is_left_to_torch() -> None:
    assert listen("192.0.2.1", 28771) is None  # of RFC 5737: nobody's
    with socket.create_server(("127.0.0.1", 0)) as other:
        assert listen("127.0.0.1", other.getsockname()[1]) is None


def test_ranks_that_torchrun_starts_again_do_not_read_what_the_failed_ones_left() -> None:
    port = free_port()
    agent = {"TORCHELASTIC_USE_AGENT_STORE": "True"}
    first = open_store(ranks("127.0.0.1", port)[0], WITHIN, {})  # which also holds the store
    again = open_store(ranks("127.0.0.1", port)[1], WITHIN, agent | {"TORCHELASTIC_RESTART_COUNT": "1"})
    first.set("ddlbench/failure", "rank 1: killed")
    assert first.clone().check(["ddlbench/failure"])
    assert not again.clone().check(["ddlbench/failure"])
