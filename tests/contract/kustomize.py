"""The part of kustomize that ``deploy/k8s`` uses, so that overlays can be rendered without it.

Resources, components, images, a namespace, ConfigMaps from files (without the hash in their names), JSON patches, and
patches that delete. A field that is not known here is an error, so that nothing is silently left out.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

Document = dict[str, Any]

_KNOWN = {
    "apiVersion", "kind", "namespace", "resources", "components", "configMapGenerator", "images", "patches",
}  # fmt: skip
_CLUSTER_WIDE = {"Namespace"}


class _StrictLoader(yaml.SafeLoader):
    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value if key.tag != "tag:yaml.org,2002:merge"]
        twice = {str(key) for key in keys if keys.count(key) > 1}
        if twice:
            raise ValueError(f"{node.start_mark}: given twice: {', '.join(sorted(twice))}")
        return super().construct_mapping(node, deep)


def load_documents(text: str) -> list[Document]:
    """The documents of a YAML text.

    Raises:
        ValueError: a key is given twice.
    """
    loaded = list(yaml.load_all(text, _StrictLoader))
    return [copy.deepcopy(document) for document in loaded if document is not None]  # anchors share their values


def render(folder: Path, extra_components: tuple[Path, ...] = ()) -> list[Document]:
    """What ``kubectl kustomize folder`` would print; ``extra_components`` as if the kustomization named them."""
    description = _read(folder)
    found = [document for name in description.get("resources", ()) for document in _resource(folder / name)]
    found += [_config_map(folder, entry) for entry in description.get("configMapGenerator", ())]
    components = [folder / name for name in description.get("components", ())]
    for component in (*components, *extra_components):
        added = _read(component)
        found += [document for name in added.get("resources", ()) for document in _resource(component / name)]
        found = _patched(found, added.get("patches", ()))
    found = _patched(found, description.get("patches", ()))
    for document in found:
        if "namespace" in description and document["kind"] not in _CLUSTER_WIDE:
            document["metadata"]["namespace"] = description["namespace"]
        _set_images(document, description.get("images", ()))
    return found


def _read(folder: Path) -> Document:
    (description,) = load_documents((folder / "kustomization.yaml").read_text(encoding="utf-8"))
    unknown = description.keys() - _KNOWN
    assert not unknown, f"{folder}: {unknown} is not known here"
    return description


def _resource(path: Path) -> list[Document]:
    return render(path.resolve()) if path.is_dir() else load_documents(path.read_text(encoding="utf-8"))


def _config_map(folder: Path, entry: Document) -> Document:
    data = {name: (folder / name).read_text(encoding="utf-8") for name in entry["files"]}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": entry["name"]}, "data": data}


def _patched(documents: list[Document], patches: list[Document]) -> list[Document]:
    for entry in patches:
        hit = [document for document in documents if _is_target(document, entry["target"])]
        (patch,) = yaml.load_all(entry["patch"], _StrictLoader)
        if isinstance(patch, list):
            assert hit, f"nothing is {entry['target']}"
            for document in hit:
                for operation in patch:
                    _apply(document, copy.deepcopy(operation))
        else:
            assert patch["$patch"] == "delete", "merging is not known here"
            documents = [document for document in documents if document not in hit]
    return documents


def _is_target(document: Document, target: Document) -> bool:
    return document["kind"] == target["kind"] and bool(re.fullmatch(target["name"], document["metadata"]["name"]))


def _apply(document: Document, operation: Document) -> None:
    """One operation of RFC 6902."""
    *parents, last = [part.replace("~1", "/").replace("~0", "~") for part in operation["path"].split("/")[1:]]
    place: Any = document
    for part in parents:
        place = place[int(part)] if isinstance(place, list) else place[part]
    match operation["op"], place:
        case "add", list():
            place.insert(len(place) if last == "-" else int(last), operation["value"])
        case "add", dict():
            place[last] = operation["value"]
        case "replace", dict():
            assert last in place, f"{operation['path']} is not there"
            place[last] = operation["value"]
        case other, _:
            raise AssertionError(f"{other} is not known here")


def _set_images(document: Document, images: list[Document]) -> None:
    for container in containers(document):
        for image in images:
            if container["image"] == image["name"]:
                container["image"] = f"{image['newName']}:{image['newTag']}"


def containers(document: Document) -> Iterator[Document]:
    """The containers of a workload; none of anything else."""
    if document["kind"] in ("Deployment", "StatefulSet"):
        yield from document["spec"]["template"]["spec"]["containers"]
