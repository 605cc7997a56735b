import gc
import os
import signal
from collections.abc import Generator
from contextlib import nullcontext
from functools import partial
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import anyio
import pytest
from hypothesis import HealthCheck, settings

from belljar.environments import Environment
from belljar.environments.base import describe, inspect_interpreter
from belljar.environments.managed import Recipe, compile_packages, prepare
from belljar.errors import EnvironmentBroken
from local_index import IndexedPackages, LocalIndex, add_support
from shared_certificates import with_shared_certificates
from shared_environment import UNCHANGING, prepared_environment, settings_with, with_shared_inspection
from warm_processes import with_warm_processes

try:
    distribution("belljar-mcp")
except PackageNotFoundError:
    pytest.exit("belljar-mcp is not installed in this environment: run scripts/setup", returncode=4)

# A shell starts what runs in the background with interrupts ignored, and every process of the tests would be, too.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# A busy machine is no fault of the values that are tried. A long run tries more of them.
IS_LONG = bool(os.environ.get("BELLJAR_LONG"))
settings.register_profile(
    "default", deadline=None, suppress_health_check=[HealthCheck.too_slow], max_examples=100 if IS_LONG else 30
)
settings.load_profile("default")

# Thousands of tests are collected by every worker, and nothing of that is garbage: a fifth less time without it.
gc.disable()

# A file is one worker's: those that take longest come first, or the others would wait for them at the end.
LONGEST = [
    "test_image.py",
    "test_ordinary_user.py",
    "test_faults.py",
    "test_workflow_faults.py",
    "test_stopped_servers.py",
    "test_inspector.py",
    "test_no_leaks.py",
    "test_wrapper_kernel.py",
    "test_azure_clients.py",
    "test_hibernation.py",
    "test_workers.py",
    "test_run.py",
    "test_hosts_lost.py",
    "test_keep_alive.py",
    "test_saved_state.py",
    "test_routing.py",
    "test_products.py",
    "test_memory_of_others.py",
    "test_hostile_parsers.py",
    "test_session_packages.py",
    "test_map.py",
    "test_kernel_forks.py",
    "test_api.py",
    "test_hosts_store.py",
    "test_results.py",
    "test_escapes.py",
    "test_hostile_patterns.py",
    "test_installs.py",
    "test_ipython.py",
    "test_figures.py",
    "test_transports.py",
    "test_zygotes.py",
    "test_interpreter.py",
    "test_resource_limits.py",
    "test_variables.py",
    "test_forked_hygiene.py",
    "test_as_in_jupyter.py",
    "test_entry.py",
    "test_workflow_command.py",
    "test_container.py",
    "test_stored_sessions.py",
    "test_kernel_conformance.py",
    "test_forged_messages.py",
    "test_server_limits.py",
    "test_contract.py",
    "test_hostile_texts.py",
    "test_bad_input.py",
    "test_planted_files.py",
    "test_snapshots.py",
    "test_origins.py",
    "test_azure_pool.py",
    "test_limits.py",
    "test_hosts.py",
    "test_hostile_workflows.py",
    "test_foundry_mcp.py",
    "test_observability.py",
    "test_jupyter.py",
    "test_other_platforms.py",
    "test_stopped_cells.py",
    "test_forked_sandboxes.py",
    "test_export.py",
    "test_attach.py",
    "test_doctor.py",
    "test_azure_mcp.py",
    "test_console_in_browser.py",
    "test_named_environments.py",
    "test_http.py",
    "test_forks.py",
    "test_principals.py",
]


# Long trials, which `BELLJAR_LONG=1 scripts/test` runs too: with software of others, accidents, floods, full disks,
# and once more as another user. The main road of what each of them covers is tried in short by another file.
LONG = frozenset(
    {
        "test_api_description.py",
        "test_azure_clients.py",
        "test_azure_kit.py",
        "test_browser_forms.py",
        "test_conda_packages.py",
        "test_confined_uv.py",
        "test_console_accidents.py",
        "test_console_bad_input.py",
        "test_console_by_keyboard.py",
        "test_console_with_issuer.py",
        "test_console_work_in_browser.py",
        "test_container_skills.py",
        "test_faults.py",
        "test_foreign_kernels.py",
        "test_foundry_description.py",
        "test_frames_in_browser.py",
        "test_full_disk.py",
        "test_generated_tree.py",
        "test_hanging_servers.py",
        "test_image.py",
        "test_host_faults.py",
        "test_hosts_restarted.py",
        "test_hosts_behind_proxies.py",
        "test_inspector.py",
        "test_installed_providers.py",
        "test_keep_alive_tools.py",
        "test_kernel_suite.py",
        "test_message_sizes.py",
        "test_no_leaks.py",
        "test_notifications.py",
        "test_oauth_issuer.py",
        "test_older_servers.py",
        "test_ordinary_user.py",
        "test_other_pythons.py",
        "test_proxies.py",
        "test_real_index.py",
        "test_real_servers.py",
        "test_real_skills.py",
        "test_real_tools.py",
        "test_server_examples.py",
        "test_snippets.py",
        "test_stdio_servers.py",
        "test_stopped_servers.py",
        "test_store_in_s3.py",
        "test_task_clients.py",
        "test_tasks_conformance.py",
        "test_unfinished_set_up.py",
        "test_workflow_faults.py",
        "test_workflow_race.py",
        "test_wrapper_kernel.py",
    }
)

# Single tests of other files that take long, or repeat with another parameter what a quick one proves.
LONG_TESTS = frozenset(
    {
        "test_a_bundle_that_was_changed_in_the_store_wakes_nothing_and_is_nobodys_fault",
        "test_a_cell_that_does_not_end_in_time_is_interrupted_and_its_session_moves",
        "test_a_clock_that_jumps_ends_nothing[-31536000]",
        "test_a_drain_that_is_killed_in_the_middle_leaves_each_session_in_one_place",
        "test_a_jupyter_front_end_shares_the_agents_session[tcp]",
        "test_a_jupyter_kernel_installs_and_proves_too",
        "test_a_key_without_a_session_waits_while_its_machine_is_away",
        "test_a_larger_example_says_what_it_promises",
        "test_a_machine_that_is_frozen_is_waited_for_and_keeps_its_sessions",
        "test_a_machine_that_is_killed_and_listed_as_gone_is_told_once_and_comes_back[legacy]",
        "test_a_machine_that_was_frozen_ends_what_went_on_elsewhere",
        "test_a_managed_one_is_created_listed_and_removed",
        "test_a_million_lines_arrive_whole",
        "test_a_plotly_figure_has_a_picture_where_a_browser_can_draw_it",
        "test_a_second_signal_ends_the_wait_for_cells",
        "test_a_server_that_stops_puts_its_sessions_and_one_elsewhere_goes_on",
        "test_a_server_with_another_key_neither_reads_nor_writes_the_store",
        "test_a_session_in_a_store_that_is_away_is_woken_by_nobody_until_it_is_back",
        "test_a_session_of_every_origin_outlives_a_server_that_was_killed",
        "test_a_session_outlives_its_server_only_with_folders_that_are_still_shown",
        "test_a_session_that_is_too_large_for_a_bundle_sleeps_where_it_is",
        "test_a_session_that_is_woken_where_it_slept_reads_nothing_from_the_store",
        "test_a_session_without_a_sleep_has_nothing_in_the_store",
        "test_a_signal_stops_it_in_good_order_though_calls_and_streams_are_open[legacy-2]",
        "test_a_worker_that_is_frozen_is_killed_and_comes_back",
        "test_after_a_busy_life_every_mode_is_the_narrowest",
        "test_an_identifier_survives_a_server_that_is_killed",
        "test_charts_of_bokeh_and_altair_are_pages_that_need_no_network",
        "test_every_page_follows_the_rules_for_access_in_both_themes_and_on_a_narrow_screen",
        "test_every_required_scenario_passes[2025-11-25]",
        "test_everything_of_ray_may_die_while_sessions_are_called",
        "test_fewer_workers_than_before_lose_no_session",
        "test_health_answers_beside_400_half_open_connections",
        "test_httpx_works_untouched",
        "test_letters_of_two_that_have_sessions_stay_and_both_say_what_to_do",
        "test_machines_come_and_go_with_demand_and_none_goes_before_it_is_drained",
        "test_machines_with_another_key_or_other_settings_serve_alone_and_say_so",
        "test_on_a_bad_line_no_cell_runs_twice_and_none_is_told_wrongly",
        "test_packages_that_unpack_to_more_than_there_is_room_for_end_the_installation",
        "test_pip_and_uv_of_the_session_work_through_the_proxy",
        "test_pip_is_the_environments_own_and_only_its_command_is_caught",
        "test_scikit_learn_and_joblib_work_in_parallel_without_warnings",
        "test_servers_over_http_of_an_earlier_sdk_are_connected_or_told_what_to_give",
        "test_sessions_that_come_and_go_leave_no_descriptor_in_the_server_or_the_supervisor",
        "test_ten_thousand_lines_are_told_by_their_end_and_read_in_pages",
        "test_the_default_environment_has_what_sessions_are_promised",
        "test_the_scripts_of_the_console_have_sound_types",
        "test_the_view_opens_the_session_in_the_console_where_the_server_has_one",
        "test_those_that_no_setting_names_any_more_can_be_removed",
        "test_two_servers_in_a_row_are_killed_and_a_session_that_started_cold_survives_both",
        "test_two_workers_keep_what_was_promised_through_many_accidents",
        "test_what_a_data_directory_without_a_store_left_comes_through_one",
        "test_what_fails_in_one_piece_does_not_touch_the_others[remote]",
        "test_what_has_no_cells_is_told_in_words",
        "test_what_is_taken_to_fit_fits",
        "test_what_nobody_used_for_keep_days_goes_from_the_store_and_is_gone_everywhere",
        "test_whatever_ipython_would_run_is_seen_or_refused",
    }
)


REASON = "a long trial: BELLJAR_LONG=1 runs it"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """See `LONGEST` and `LONG`; for `pytest -n`, see `scripts/test`."""
    ranks = {name: rank for rank, name in enumerate(LONGEST)}
    items.sort(key=lambda item: ranks.get(item.path.name, len(ranks)))
    if not IS_LONG:
        skipped = pytest.mark.skip(reason=REASON)
        for item in items:
            if item.path.name in LONG or {item.name, item.name.partition("[")[0]} & LONG_TESTS:
                item.add_marker(skipped)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out files of long trials, which every worker would import, unless somebody names them."""
    is_left_out = not IS_LONG and collection_path.name in LONG
    return True if is_left_out and not any(collection_path.name in word for word in config.args) else None


def pytest_report_header() -> str:
    return "" if IS_LONG else f"without {len(LONG)} files of long trials, which BELLJAR_LONG=1 runs"


def pytest_configure(config: pytest.Config) -> None:
    """Start the workers of `pytest -n` as copies of a process that has imported what they need."""
    is_controller = not hasattr(config, "workerinput") and bool(config.getoption("numprocesses", None))
    if is_controller and not os.environ.get("BELLJAR_COLD"):
        context = with_warm_processes(is_for_workers=True)
        context.__enter__()
        config.add_cleanup(lambda: context.__exit__(None, None, None))


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session", autouse=True)
def warm_processes() -> Generator[None]:
    """See `warm_processes`."""
    with nullcontext() if os.environ.get("BELLJAR_COLD") else with_warm_processes():
        yield


@pytest.fixture(scope="session", autouse=True)
def shared_certificates() -> Generator[None]:
    """See `shared_certificates`."""
    with with_shared_certificates():
        yield


@pytest.fixture(scope="session", autouse=True)
def shared_inspection() -> Generator[None]:
    """See `shared_environment`."""
    with with_shared_inspection():
        yield


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="session")
def default_environment() -> Environment:
    try:
        return prepared_environment()
    except EnvironmentBroken as error:
        if "Failed to fetch" not in error.message:
            raise
        pytest.skip(f"no package index in reach: {error.message}")


@pytest.fixture(scope="session")
def indexed(tmp_path_factory: pytest.TempPathFactory) -> IndexedPackages:
    folder = tmp_path_factory.mktemp("index")
    # For the user of its own that uv has in a sandbox of a server run by root.
    folder.chmod(0o755)
    packages = LocalIndex(folder)
    packages.add_wheel("house", "1.0", {"house.py": "floors = 1\n"})
    add_support(packages)
    cache = str(tmp_path_factory.mktemp("uv-cache"))
    return IndexedPackages(packages, {"UV_DEFAULT_INDEX": packages.url, "UV_CACHE_DIR": cache})


@pytest.fixture(scope="session")
def small_environment(indexed: IndexedPackages, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """An environment with nothing but `house` 1.0."""
    folder = tmp_path_factory.mktemp("small")
    (folder / "lock.txt").write_text("house==1.0\n")
    recipe = Recipe("small", folder / "lock.txt")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in indexed.variables.items():
            patch.setenv(name, value)
        python = anyio.run(partial(prepare, settings_with(data_directory=folder), recipe))
    environment = describe("small", inspect_interpreter(python))
    anyio.run(compile_packages, environment.prefix)
    UNCHANGING.append(environment.prefix)
    return environment


@pytest.fixture
def layer(tmp_path: Path) -> Path:
    """The folder that packages of a session are installed into, which an install makes."""
    (tmp_path / "session").mkdir()
    return tmp_path / "session" / "layer"
