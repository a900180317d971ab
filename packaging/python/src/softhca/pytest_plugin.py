"""The pytest plug-in: fixtures `softhca_hosts` and `softhca_faults`, and a report for each failed test that uses them."""

from __future__ import annotations

import re
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

from ._command import Error
from ._hosts import Faults, Hosts

_hosts_key = pytest.StashKey[Hosts]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.getgroup("softhca").addoption(
        "--softhca-reports",
        metavar="DIR",
        default="softhca-reports",
        help="folder for the HTML reports of failed tests that use softhca_hosts (default: %(default)s)",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "softhca(*hosts, recovery=None, cards=None, profile=None): names and settings of the fixture softhca_hosts"
    )


@pytest.fixture
def softhca_hosts(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    """Emulated RDMA hosts for this test: alice and bob, or those of the marker `softhca`."""
    marker = request.node.get_closest_marker("softhca")
    names, options = (marker.args, marker.kwargs) if marker else ((), {})
    with Hosts(*names, folder=tmp_path_factory.mktemp("softhca"), **options) as hosts:
        request.node.stash[_hosts_key] = hosts
        yield hosts


@pytest.fixture
def softhca_faults(softhca_hosts: Hosts) -> Faults:
    """Faults and expectations for the next program that starts on the hosts."""
    return softhca_hosts.faults


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    hosts = item.stash.get(_hosts_key, None)
    if call.when == "call" and report.failed and hosts is not None:
        folder = Path(item.config.rootpath, item.config.getoption("softhca_reports"))
        file = folder / (re.sub(r"[^\w.-]+", "-", item.nodeid).strip("-") + ".html")
        try:
            folder.mkdir(parents=True, exist_ok=True)
            hosts.report(file)
            text = "\n".join([f"report: {file}", *map(_explanation, hosts.why())])
        except (Error, OSError) as error:
            report.sections.append(("softhca", f"no report: {error}"))
            return report
        report.sections.append(("softhca", text))
        item.user_properties.append(("softhca_report", str(file)))
        html = item.config.pluginmanager.getplugin("html")
        if html is not None:  # pytest-html shows a link
            extras: list[Any] = getattr(report, "extras", [])
            report.extras = [*extras, html.extras.url(str(file), name="softhca")]  # type: ignore[attr-defined]
    return report


def _explanation(finding: dict[str, Any]) -> str:
    return f"{finding['request']} of {finding['connection']}: {finding['status']}: {finding['cause']}"
