"""The fields of the manifests in ``examples/kubernetes``: what models and schemas know, and what pods may do."""

import copy
import importlib

import pytest

from launch import PROJECT

yaml = pytest.importorskip("yaml", reason="PyYAML is missing: pip install pyyaml")

pytestmark = pytest.mark.thorough
FOLDER = PROJECT / "examples" / "kubernetes"
MODELS = {"JobSet": "JobsetV1alpha2JobSet"}
MODELS |= {kind: f"TrainerV1alpha1{kind}" for kind in ("TrainJob", "TrainingRuntime")}
# The fields of a MPIJob, of which no package has models; templates are those of pods.
MPIJOB = {
    "": {"apiVersion", "kind", "metadata", "spec"},
    "spec": {"launcherCreationPolicy", "mpiImplementation", "mpiReplicaSpecs", "runLauncherAsWorker", "runPolicy"}
    | {"slotsPerWorker", "sshAuthMountPath"},
    "spec.mpiReplicaSpecs": {"Launcher", "Worker"},
    "spec.mpiReplicaSpecs.Launcher": {"replicas", "restartPolicy", "template"},
    "spec.mpiReplicaSpecs.Worker": {"replicas", "restartPolicy", "template"},
    "spec.runPolicy": {"activeDeadlineSeconds", "backoffLimit", "cleanPodPolicy", "managedBy", "schedulingPolicy"}
    | {"suspend", "ttlSecondsAfterFinished"},
}
FREE = {"labels", "requests", "limits", "metadata"}  # whose keys are the user's
MANIFESTS = sorted(path.name for path in FOLDER.glob("*.yaml"))


def documents(name):
    return list(yaml.safe_load_all((FOLDER / name).read_text()))


def is_known(document):
    """Whether the models of its kind keep all of a document's fields: those that they do not know, they drop."""
    models = importlib.import_module("kubeflow_trainer_api.models")
    if document.get("kind") != "MPIJob":
        model = getattr(models, MODELS.get(document.get("kind"), ""), None)
        return model is not None and _kept(model, document)
    for path, fields in MPIJOB.items():
        part = document
        for key in filter(None, path.split(".")):
            part = part.get(key, {})
        if not part.keys() <= fields:
            return False
    templates = [replica.get("template", {}) for replica in document["spec"]["mpiReplicaSpecs"].values()]
    return all(_kept(models.IoK8sApiCoreV1PodTemplateSpec, template) for template in templates)


def _kept(model, part):
    try:
        return model.from_dict(part).to_dict() == part
    except (ValueError, AttributeError):  # a field that must be there, or a text in the place of fields
        return False


def misspelt(part):
    """A copy for every field of a document, in which that one has another name."""
    for key, value in part.items() if isinstance(part, dict) else enumerate(part):
        if isinstance(part, dict) and key not in FREE:
            yield {(f"{name}x" if name == key else name): of for name, of in part.items()}
        for other in misspelt(value) if isinstance(value, dict | list) and key not in FREE else ():
            changed = copy.copy(part)
            changed[key] = other
            yield changed


@pytest.mark.parametrize("name", MANIFESTS)
def test_the_models_of_kubeflow_know_every_field_and_no_misspelt_one(name):
    pytest.importorskip("kubeflow_trainer_api", reason="kubeflow-trainer-api is missing: pip install it")
    for document in documents(name):
        assert is_known(document), document
        wrong = list(misspelt(document))
        assert len(wrong) > 10
        for other in wrong:
            assert not is_known(other), other


@pytest.mark.parametrize("name", MANIFESTS)
def test_kubernetes_knows_the_pods_and_the_jobs(name):
    """By its own schemas, which refuse unknown fields."""
    kubernetes = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is missing: pip install it")
    specs = [part for document in documents(name) for part in specs_of(document)]
    assert specs
    for spec in specs:
        kind = {"apiVersion": "batch/v1", "kind": "Job"} if "template" in spec else {"apiVersion": "v1", "kind": "Pod"}
        kubernetes.validate({**kind, "metadata": {"name": "x"}, "spec": spec}, kubernetes.latest_version(), strict=True)


def specs_of(document):
    """The specifications of Jobs in a document, and of Pods in it that are in none."""
    spec = document["spec"]
    template = spec.get("template", document)["spec"]
    jobs = [job["template"]["spec"] for job in template.get("replicatedJobs", ())]
    return jobs + [replica["template"]["spec"] for replica in spec.get("mpiReplicaSpecs", {}).values()]


def test_all_pods_are_those_of_users_without_rights():
    """And their memory is shared, their time to save is long, they ask for what they need."""
    for name in MANIFESTS:
        for spec in (spec for document in documents(name) for spec in specs_of(document)):
            pod = spec.get("template", {"spec": spec})["spec"]
            assert pod["securityContext"]["runAsNonRoot"], name
            assert pod["terminationGracePeriodSeconds"] >= 120, name
            (container,) = pod["containers"]
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "capabilities": {"drop": ["ALL"]},
            }
