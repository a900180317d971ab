from pathlib import Path

import pytest
import softhca

LOST = """
title = "A lost packet is fatal"
[hosts]
alice = {}
bob = {}
[[pair]]
qps = ["alice.1", "bob.1"]
[[step]]
qp = "alice.1"
write = { bytes = 4000 }
[[fault]]
name = "lose the second packet"
on = "alice -> bob"
match = { class = "request", psn = "+1" }
action = "drop"
times = 1
[[expect]]
completion = { qp = "alice.1", op = "write", status = "STATUS" }
"""


@pytest.fixture
def lost(tmp_path: Path) -> Path:
    file = tmp_path / "lost.toml"
    file.write_text(LOST.replace("STATUS", "RETRY_EXC_ERR"))
    return file


def test_a_verdict_names_what_held(lost: Path) -> None:
    [result] = softhca.run(lost)
    assert result.passed and result.verdict == "pass"
    assert [(rule.name, rule.fired) for rule in result.rules] == [("lose the second packet", 1)]
    assert [expectation.held for expectation in result.expectations] == [True]
    assert str(lost) in result.replay


def test_every_seed_has_a_result(lost: Path) -> None:
    results = softhca.run(lost, seeds=(3, 6))
    assert [result.seed for result in results] == [3, 4, 5, 6]
    assert softhca.run(lost, seed=4)[0].trace_sha256 == results[1].trace_sha256


def test_a_failed_expectation_is_a_result_and_not_an_exception(tmp_path: Path) -> None:
    file = tmp_path / "wrong.toml"
    file.write_text(LOST.replace("STATUS", "SUCCESS"))
    [result] = softhca.run(file, out=tmp_path / "out")
    assert result.verdict == "fail"
    assert len(result.failures) == 1
    [log] = (tmp_path / "out").rglob("events.jsonl")
    assert any("psn" in str(event) for event in softhca.events(log))
    assert [finding["status"] for finding in softhca.why(log)] == ["RETRY_EXC_ERR"]
    assert softhca.report(log, tmp_path / "report.html").read_text().startswith("<!")


def test_a_file_with_an_error_is_an_exception_with_its_line(tmp_path: Path) -> None:
    file = tmp_path / "broken.toml"
    file.write_text('title = "x"\n[hosts]\nalice = {}\n[[fault]]\nactoin = "drop"\n')
    with pytest.raises(softhca.Error, match="5"):
        softhca.run(file)


def test_a_missing_command_is_an_exception_with_its_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOFTHCA_COMMAND", "/nonexistent/softhca")
    with pytest.raises(FileNotFoundError, match="/nonexistent/softhca"):
        softhca.run("x.toml")
