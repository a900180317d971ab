import html
import re
from pathlib import Path

import pytest

TESTS = """
    import sys, pytest

    def test_hosts_run_programs(softhca_hosts):
        assert softhca_hosts.run("alice", ["true"]).returncode == 0

    @pytest.mark.softhca("client", "server", recovery="go-back-n")
    def test_the_marker_names_hosts(softhca_hosts):
        assert softhca_hosts.names == ("client", "server")

    def test_a_fault_goes_to_the_next_program(softhca_hosts, softhca_faults):
        softhca_faults.add(host="alice", verb="reg_mr", nth=1, action={"fail": "ENOMEM"}, optional=True)
        verdict = softhca_hosts.run("alice", ["true"]).verdict
        assert verdict.rules[0].optional

    def test_that_fails(softhca_hosts):
        softhca_hosts.run("alice", ["sh", "-c", "echo broken; exit 1"])

    def test_without_hosts():
        assert False
"""


def check(result: pytest.RunResult, pytester: pytest.Pytester) -> None:
    result.assert_outcomes(passed=3, failed=2)
    [report] = (pytester.path / "softhca-reports").iterdir()
    assert re.search(r"test_that_fails.html$", report.name)
    assert "<html" in report.read_text()
    result.stdout.fnmatch_lines(["*broken*", "*report: */test_*test_that_fails.html"])


def test_a_failed_test_has_a_report(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(TESTS)
    check(pytester.runpytest_subprocess("-p", "no:cacheprovider", "--junit-xml=junit.xml"), pytester)
    junit = (pytester.path / "junit.xml").read_text()
    assert junit.count('name="softhca_report"') == 1


def test_workers_of_xdist_have_hosts_of_their_own(pytester: pytest.Pytester) -> None:
    pytest.importorskip("xdist")
    pytester.makepyfile(TESTS)
    check(pytester.runpytest_subprocess("-n", "4"), pytester)


def test_the_folder_of_reports_can_be_chosen(pytester: pytest.Pytester, tmp_path: Path) -> None:
    pytester.makepyfile(TESTS)
    pytester.runpytest_subprocess(f"--softhca-reports={tmp_path / 'there'}")
    assert len(list((tmp_path / "there").iterdir())) == 1
    assert not (pytester.path / "softhca-reports").exists()


def test_pytest_html_links_to_the_report(pytester: pytest.Pytester) -> None:
    pytest.importorskip("pytest_html")
    pytester.makepyfile(TESTS)
    pytester.runpytest_subprocess("--html=all.html", "--self-contained-html")
    page = html.unescape((pytester.path / "all.html").read_text())
    assert len(re.findall(r'href=\\?"[^"]*that_fails\.html\\?"', page)) == 1
