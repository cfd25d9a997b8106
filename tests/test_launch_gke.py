"""launch/gke.sh and gke_jobset.yaml: what is submitted is a JobSet that the API allows, and says what it has to."""

from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from launch_machine import FALSE_TOOL, Machine

GKE = "--name a-1 --image eu/i:1 --tpu v5e --topology 16x16 --claim c --run_dir /shared/a".split()

Schema = dict[str, Any]
NAME: Schema = {"type": "string", "pattern": "^[a-z]([-a-z0-9]*[a-z0-9])?$", "maxLength": 63}
TEXT: Schema = {"type": "string", "minLength": 1}
BOOLEAN: Schema = {"type": "boolean"}


def whole(least: int) -> Schema:
    return {"type": "integer", "minimum": least}


def some(items: Schema) -> Schema:
    return {"type": "array", "minItems": 1, "items": items}


def closed(**properties: Schema) -> Schema:
    """An object with these fields, all of them, and no other; in a name, one _ is a dot, and two are a slash."""
    names = {name.replace("__", "/").replace("_", "."): schema for name, schema in properties.items()}
    return {"type": "object", "additionalProperties": False, "required": [*names], "properties": names}


# The fields of JobSet v1alpha2, Job v1 and Pod v1 that the template uses, with the types and values that they allow.
CONTAINER = closed(
    name=NAME,
    image=TEXT,
    args={"type": "array", "items": {"type": "string"}},
    ports=some(closed(containerPort={"type": "integer", "minimum": 1, "maximum": 65535})),
    securityContext=closed(privileged=BOOLEAN, runAsUser=whole(0)),
    resources=closed(requests=closed(google_com__tpu=whole(1)), limits=closed(google_com__tpu=whole(1))),
    volumeMounts=some(closed(name=NAME, mountPath={"type": "string", "pattern": "^/"})),
)
POD = closed(
    restartPolicy={"const": "Never"},  # what a podFailurePolicy needs
    terminationGracePeriodSeconds=whole(0),
    hostNetwork=BOOLEAN,
    dnsPolicy={"enum": ["ClusterFirst", "ClusterFirstWithHostNet", "Default", "None"]},
    nodeSelector={"type": "object", "additionalProperties": {"type": "string"}},
    containers=some(CONTAINER),
    volumes=some(closed(name=NAME, persistentVolumeClaim=closed(claimName=TEXT))),
)
EXIT_CODES = closed(
    containerName=NAME,
    operator={"enum": ["In", "NotIn"]},
    values={"type": "array", "minItems": 1, "uniqueItems": True, "items": whole(1)},
)
JOB = closed(
    completionMode={"enum": ["Indexed", "NonIndexed"]},
    parallelism=whole(1),
    completions=whole(1),
    backoffLimit=whole(0),
    podFailurePolicy=closed(
        rules=some(closed(action={"enum": ["FailJob", "FailIndex", "Ignore", "Count"]}, onExitCodes=EXIT_CODES))
    ),
    template=closed(spec=POD),
)
RULE = closed(
    name={"type": "string", "pattern": "^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$"},
    action={"enum": ["FailJobSet", "RestartJobSet", "RestartJobSetAndIgnoreMaxRestarts"]},
    onJobFailureReasons=some({"enum": ["BackoffLimitExceeded", "DeadlineExceeded", "PodFailurePolicy"]}),
)
JOBSET = closed(
    apiVersion={"const": "jobset.x-k8s.io/v1alpha2"},
    kind={"const": "JobSet"},
    metadata=closed(
        name=NAME, namespace=TEXT, annotations={"type": "object", "additionalProperties": {"type": "string"}}
    ),
    spec=closed(
        network=closed(enableDNSHostnames=BOOLEAN, publishNotReadyAddresses=BOOLEAN),
        failurePolicy=closed(
            maxRestarts=whole(0),
            restartStrategy={"enum": ["Recreate", "BlockingRecreate", "InPlaceRestart"]},
            rules=some(RULE),
        ),
        replicatedJobs=some(closed(name=NAME, replicas=whole(1), template=closed(spec=JOB))),
    ),
)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    machine = Machine(tmp_path)
    machine.tool("kubectl", FALSE_TOOL + 'cat >"$ANSWERS/submitted"; exit "$(answer kubectl)"\n')
    return machine


def rendered(machine: Machine, *flags: str) -> dict[str, Any]:
    status, output, errors = machine.run("launch/gke.sh", "--dry_run", *flags)
    assert status == 0, errors
    first, *lines, last = output.splitlines()
    assert first == "kubectl create -f - <<'END_OF_JOBSET'" and last == "END_OF_JOBSET"
    return yaml.safe_load("\n".join(lines))


def pod(jobset: dict[str, Any]) -> dict[str, Any]:
    return jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]


@pytest.mark.parametrize("more", ["", "--slices 2 --namespace on --claim 123 --image true --restarts 0"])
def test_the_jobset_is_one_that_the_api_allows(machine: Machine, more: str):
    jobset = rendered(machine, *GKE, *more.split(), "--")
    jsonschema.validate(jobset, JOBSET)
    assert "{{" not in yaml.safe_dump(jobset)


def test_a_jobset_with_an_unknown_field_or_a_wrong_type_is_refused(machine: Machine):
    jobset = rendered(machine, *GKE)
    for place, field, value in [(jobset["spec"], "replicas", 1), (pod(jobset), "hostNetwork", "yes")]:
        before = dict(place)
        place[field] = value
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(jobset, JOBSET)
        place.clear()
        place.update(before)
    jsonschema.validate(jobset, JOBSET)


def test_exit_code_75_starts_it_again_and_bad_input_ends_it(machine: Machine):
    spec = rendered(machine, *GKE, "--restarts", "7")["spec"]
    job = spec["replicatedJobs"][0]["template"]["spec"]
    (rule,) = job["podFailurePolicy"]["rules"]
    codes = rule["onExitCodes"]
    assert (rule["action"], codes["operator"], codes["values"]) == ("FailJob", "In", [2, 3, 4])
    assert codes["containerName"] == job["template"]["spec"]["containers"][0]["name"]
    assert [(rule["action"], rule["onJobFailureReasons"]) for rule in spec["failurePolicy"]["rules"]] == [
        ("FailJobSet", ["PodFailurePolicy"])
    ]
    assert spec["failurePolicy"]["maxRestarts"] == 7 and job["backoffLimit"] == 0


@pytest.mark.parametrize(
    "tpu, topology, more, accelerator, hosts, chips",
    [
        ("v5e", "16x16", "", "tpu-v5-lite-podslice", 64, 4),
        ("v5p", "8x8x16", "", "tpu-v5p-slice", 256, 4),
        ("v4", "2x2x4", "", "tpu-v4-podslice", 4, 4),
        ("v6e", "1x1", "", "tpu-v6e-slice", 1, 1),
        ("v5e", "2x4", "--chips_per_host 8", "tpu-v5-lite-podslice", 1, 8),
    ],
)
def test_the_hosts_of_a_slice_follow_from_its_topology(machine, tpu, topology, more, accelerator, hosts, chips):
    jobset = rendered(machine, *GKE, "--tpu", tpu, "--topology", topology, "--slices", "3", *more.split())
    (jobs,) = jobset["spec"]["replicatedJobs"]
    job = jobs["template"]["spec"]
    assert (jobs["replicas"], job["parallelism"], job["completions"]) == (3, hosts, hosts)
    assert pod(jobset)["nodeSelector"] == {
        "cloud.google.com/gke-tpu-accelerator": accelerator,
        "cloud.google.com/gke-tpu-topology": topology,
    }
    resources = pod(jobset)["containers"][0]["resources"]
    assert resources["requests"] == resources["limits"] == {"google.com/tpu": chips}


def test_train_flags_reach_the_container_as_they_are(machine: Machine):
    words = ["--x", 'a "b"', "\\", "& {{NAME}} {{IMAGE}}", "- x: #y", "$(HOME)", ""]
    jobset = rendered(machine, *GKE, "--mount", "/m", "--run_dir", "/m/a", "--", *words)
    container = pod(jobset)["containers"][0]
    # Kubernetes reads $$(HOME) as $(HOME), and $(HOME) as a variable of the pod
    assert container["args"] == ["--run.dir", "/m/a", *[word.replace("$(", "$$(") for word in words]]
    assert container["volumeMounts"][0]["mountPath"] == "/m"


@pytest.mark.parametrize("status", [0, 1])
def test_gke_submits_what_the_dry_run_shows(machine: Machine, status: int):
    machine.answer(kubectl=str(status))
    shown = rendered(machine, *GKE, "--", "--x", "a b")
    assert machine.run("launch/gke.sh", *GKE, "--", "--x", "a b")[0] == status
    assert machine.calls() == ["kubectl create -f -"]
    assert yaml.safe_load((machine.answers / "submitted").read_text()) == shown
