import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import softhca

needs_devinfo = pytest.mark.skipif(shutil.which("ibv_devinfo") is None, reason="ibv_devinfo is not installed")
needs_perftest = pytest.mark.skipif(shutil.which("ib_write_bw") is None, reason="perftest is not installed")
# python3-pyverbs is Debian's, for Debian's interpreter.
PYVERBS = "/usr/bin/python3"
needs_pyverbs = pytest.mark.skipif(
    not Path(PYVERBS).exists() or subprocess.run([PYVERBS, "-c", "import pyverbs.device"], capture_output=True).returncode != 0,
    reason="python3-pyverbs is not installed",
)


def port_is_open(port: int) -> bool:
    suffix = f":{port:04X}"
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            _, local, _, state, *_ = line.split()
            if local.endswith(suffix) and state == "0A":
                return True
    return False


def start_server(hosts: softhca.Hosts, host: str, port: int) -> softhca.Program:
    server = hosts.start(host, ["ib_write_bw", "-n", "100", "-p", str(port)])
    while not port_is_open(port):
        assert server.process.poll() is None, server.outputs()
    return server


def test_hosts_have_different_addresses() -> None:
    with softhca.Hosts("alice", "bob", "carol") as hosts:
        assert len({hosts.address(name) for name in ("alice", "bob", "carol")}) == 3


@needs_devinfo
def test_a_program_sees_the_card_of_its_host() -> None:
    with softhca.Hosts("alice", "bob", cards=2) as hosts:
        assert "softhca0" in hosts.run("alice", ["ibv_devinfo"]).stdout
        found = hosts.run("bob", ["ibv_devinfo"]).stdout
        assert "softhca2" in found and "softhca3" in found and "softhca0" not in found
        listed = subprocess.run(
            ["ibv_devices"], env={"PATH": "/usr/bin:/bin", **hosts.environment("bob")}, capture_output=True, text=True
        )
        assert "softhca2" in listed.stdout


@needs_devinfo
def test_a_port_that_is_down_is_seen_by_programs() -> None:
    with softhca.Hosts() as hosts:
        hosts.link("alice", "down")
        assert "PORT_DOWN" in hosts.run("alice", ["ibv_devinfo"]).stdout
        hosts.link("alice", "up")
        assert "PORT_ACTIVE" in hosts.run("alice", ["ibv_devinfo"]).stdout


@needs_perftest
def test_a_fault_hits_a_program_and_is_explained(free_port: int) -> None:
    with softhca.Hosts("alice", "bob") as hosts:
        start_server(hosts, "alice", free_port)
        hosts.faults.add(on="bob -> alice", match={"class": "request", "qp": "bob.1", "psn": "+2"}, action="drop", times=1)
        hosts.faults.expect(completion={"qp": "bob.1", "status": "RETRY_EXC_ERR", "times": 1})
        result = hosts.run("bob", ["ib_write_bw", "-n", "100", "-p", str(free_port), "localhost"], check=False)
        assert result.verdict is not None and result.verdict.passed
        assert result.verdict.rules[0].fired == 1
        assert not hosts.faults
        [finding] = [found for found in hosts.why() if found["status"] == "RETRY_EXC_ERR"]
        assert finding["certainty"] == "known"
        assert hosts.capture.stat().st_size > 1000


@needs_perftest
def test_go_back_n_survives_the_same_fault(free_port: int) -> None:
    with softhca.Hosts("alice", "bob", recovery="go-back-n") as hosts:
        server = start_server(hosts, "alice", free_port)
        hosts.faults.add(on="bob -> alice", match={"class": "request", "qp": "bob.1", "psn": "+2"}, action="drop", times=1)
        hosts.faults.expect(counter={"host": "bob", "name": "retransmitted_pkts", "is": ">= 1"})
        hosts.run("bob", ["ib_write_bw", "-n", "100", "-p", str(free_port), "localhost"])
        server.wait()


@needs_devinfo
def test_an_expectation_that_fails_raises_with_its_text() -> None:
    with softhca.Hosts() as hosts:
        hosts.faults.expect(completion={"qp": "alice.1", "status": "SUCCESS", "times": ">= 1"})
        with pytest.raises(softhca.Error, match="an expectation did not hold: .*alice.1"):
            hosts.run("alice", ["ibv_devinfo"])


@needs_pyverbs
def test_pyverbs_registers_memory_and_sees_an_injected_error() -> None:
    program = (
        "from pyverbs.device import Context\n"
        "from pyverbs.pd import PD\n"
        "from pyverbs.mr import MR\n"
        "from pyverbs.pyverbs_error import PyverbsRDMAError\n"
        "pd = PD(Context(name='softhca0'))\n"
        "for _ in range(3):\n"
        "    try: print('key', MR(pd, 4096, 1).lkey != 0)\n"
        "    except PyverbsRDMAError as error: print('errno', error.error_code)\n"
    )
    with softhca.Hosts() as hosts:
        hosts.faults.add(host="alice", verb="reg_mr", nth=2, action={"fail": "ENOMEM"})
        printed = hosts.run("alice", [PYVERBS, "-c", program]).stdout
    assert printed.splitlines() == ["key True", "errno 12", "key True"]


def test_programs_end_with_their_hosts() -> None:
    with softhca.Hosts() as hosts:
        program = hosts.start("alice", [sys.executable, "-c", "import time; time.sleep(600)"])
    assert program.process.returncode == -9


def test_a_program_that_fails_raises_with_its_output() -> None:
    with softhca.Hosts() as hosts:
        with pytest.raises(softhca.Error, match="exit code 3\nsaid"):
            hosts.run("alice", ["sh", "-c", "echo said; exit 3"])
        with pytest.raises(softhca.Error, match="no host 'dave', only alice, bob"):
            hosts.run("dave", ["true"])


def test_a_program_with_a_large_output_does_not_wait_for_a_reader(tmp_path: Path) -> None:
    done = tmp_path / "done"
    with softhca.Hosts() as hosts:
        program = hosts.start("alice", ["sh", "-c", f"yes | head -c 1000000; echo end; touch {done}"])
        hosts.run("bob", ["sh", "-c", f"until [ -e {done} ]; do sleep 0.1; done"])
        assert program.wait().stdout.endswith("end\n")


def test_a_daemon_that_cannot_start_raises_with_its_message() -> None:
    with pytest.raises(softhca.Error, match="a/b"):
        with softhca.Hosts("a/b"):
            pass
