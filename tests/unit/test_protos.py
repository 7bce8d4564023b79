"""The protos: lint, doc comments, and stubs equal to the pinned generator's output."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from google.protobuf import descriptor_pb2 as dpb

from scripts.descriptor_set import PLACE, descriptor_set

ROOT = Path(__file__).resolve().parents[2]
PROTOS = ROOT / "protos"
GENERATOR = ROOT / ".venv-protos" / "bin" / "python"
BUF = ROOT / "build" / "buf" / "node_modules" / ".bin" / "buf"

needs_generator = pytest.mark.skipif(not GENERATOR.exists(), reason="the generator is not installed: make setup")
needs_buf = pytest.mark.skipif(not BUF.exists(), reason="buf is not installed: make setup brings it where npm is there")


def proto_files() -> list[str]:
    return sorted(str(path.relative_to(PROTOS)) for path in PROTOS.rglob("*.proto"))


def stubs(folder: Path) -> dict[Path, str]:
    """Stubs below a folder, without compiled modules."""
    paths = [path for kind in ("py", "pyi") for path in (folder / "fissile").rglob(f"*_pb2*.{kind}")]
    return {path.relative_to(folder): path.read_text() for path in paths}


@needs_generator
def test_stubs_equal_pinned_generator_output(tmp_path: Path) -> None:
    subprocess.run([ROOT / "scripts" / "protos.sh", tmp_path], check=True, capture_output=True, text=True)
    made, checked_in = stubs(tmp_path), stubs(PROTOS)
    assert made.keys() == checked_in.keys()
    changed = [str(path) for path, text in made.items() if text != checked_in[path]]
    assert changed == [], "run `make protos` and commit what it changes"


def test_envoy_descriptor_set_equals_the_stubs() -> None:
    """Without the types of error details Envoy sends errors with an empty body."""
    checked_in = dpb.FileDescriptorSet.FromString(PLACE.read_bytes())
    made = descriptor_set()

    def ours(files: dpb.FileDescriptorSet) -> list[dpb.FileDescriptorProto]:
        return [file for file in files.file if file.name.startswith("fissile/")]

    assert ours(checked_in) == ours(made), "run `make protos` and commit what it changes"
    # Files of other packages may have another version than the installed one, so only their names count.
    assert [file.name for file in checked_in.file] == [file.name for file in made.file]
    details = next(file for file in checked_in.file if file.name == "google/rpc/error_details.proto")
    assert {"ErrorInfo", "BadRequest", "RetryInfo"} <= {message.name for message in details.message_type}


@needs_generator
def test_stubs_load_on_pinned_generator_runtime() -> None:
    program = (
        "import google.protobuf, sys; sys.path.insert(0, 'protos'); "
        "from fissile.v1 import inference_pb2_grpc; from fissile.worker.v1 import worker_pb2_grpc; "
        "print(google.protobuf.__version__)"
    )
    result = subprocess.run([GENERATOR, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout.startswith("6.")


@needs_buf
def test_lint_is_clean() -> None:
    result = subprocess.run([BUF, "lint"], cwd=PROTOS, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


@needs_buf
def test_no_change_breaks_a_client() -> None:
    """Compares with the recorded descriptor of `buf build -o protos/recorded.binpb protos`."""
    command = [str(BUF), "breaking", "--against", "recorded.binpb"]
    result = subprocess.run(command, cwd=PROTOS, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


@needs_buf
def test_incompatible_proto_change_is_found(tmp_path: Path) -> None:
    shutil.copytree(PROTOS, tmp_path / "protos", ignore=shutil.ignore_patterns("*.py*"))
    proto = tmp_path / "protos" / "fissile" / "v1" / "inference.proto"
    text = proto.read_text("utf-8")
    assert "  string text = 3;\n  // Token ids generated" in text
    proto.write_text(
        text.replace("  string text = 3;\n  // Token ids generated", "  string words = 3;\n  // Token"), "utf-8"
    )
    command = [str(BUF), "breaking", "--against", str(PROTOS / "recorded.binpb")]
    result = subprocess.run(command, cwd=tmp_path / "protos", capture_output=True, text=True, check=False)
    assert result.returncode != 0
    assert 'Field "3" on message "GenerateResponse"' in result.stdout


@pytest.mark.parametrize("path", proto_files())
@pytest.mark.parametrize(
    "option",
    [
        "csharp_namespace",
        "go_package",
        "java_multiple_files = true",
        "java_outer_classname",
        "java_package",
        "objc_class_prefix",
        "php_namespace",
        "ruby_package",
        "swift_prefix",
    ],
)
def test_every_language_generates_without_a_flag(path: str, option: str) -> None:
    """Regression: protoc-gen-go refused the protos, and Java put all messages into one class."""
    assert f"\noption {option}" in (PROTOS / path).read_text("utf-8")


def undocumented(file: dpb.FileDescriptorProto) -> Iterator[str]:
    """Names of messages, fields, oneofs, enums, values, services and rpcs without a comment."""
    commented = {tuple(at.path) for at in file.source_code_info.location if at.leading_comments.strip()}
    names = [
        *(named for i, message in enumerate(file.message_type) for named in message_names((4, i), message)),
        *(named for i, enum in enumerate(file.enum_type) for named in enum_names((5, i), enum, file.package)),
        *(named for i, service in enumerate(file.service) for named in service_names((6, i), service)),
    ]
    yield from (f"{file.name}: {name}" for path, name in names if path not in commented)


Named = tuple[tuple[int, ...], str]


def message_names(path: tuple[int, ...], message: dpb.DescriptorProto) -> Iterator[Named]:
    # Numbers are the field numbers in descriptor.proto, as SourceCodeInfo.Location.path has them.
    yield path, message.name
    synthetic = {field.oneof_index for field in message.field if field.proto3_optional}
    for i, field in enumerate(message.field):
        yield (*path, 2, i), f"{message.name}.{field.name}"
    for i, oneof in enumerate(message.oneof_decl):
        if i not in synthetic:
            yield (*path, 8, i), f"{message.name}.{oneof.name}"
    # The compiler generates a message for each map field.
    for i, nested in enumerate(message.nested_type):
        if nested.options.map_entry:
            continue
        yield from message_names((*path, 3, i), nested)
    for i, enum in enumerate(message.enum_type):
        yield from enum_names((*path, 4, i), enum, message.name)


def enum_names(path: tuple[int, ...], enum: dpb.EnumDescriptorProto, scope: str) -> Iterator[Named]:
    yield path, f"{scope}.{enum.name}"
    for i, value in enumerate(enum.value):
        yield (*path, 2, i), f"{scope}.{enum.name}.{value.name}"


def service_names(path: tuple[int, ...], service: dpb.ServiceDescriptorProto) -> Iterator[Named]:
    yield path, service.name
    for i, method in enumerate(service.method):
        yield (*path, 2, i), f"{service.name}.{method.name}"


def described(folder: Path, *files: str, include: Path) -> list[dpb.FileDescriptorProto]:
    """The given files as descriptors with their comments."""
    out = folder / "described.binpb"
    options = [f"-I{include}", "--include_source_info", f"--descriptor_set_out={out}"]
    subprocess.run([str(GENERATOR), "-m", "grpc_tools.protoc", *options, *files], check=True)
    return list(dpb.FileDescriptorSet.FromString(out.read_bytes()).file)


@needs_generator
def test_everything_has_a_doc_comment(tmp_path: Path) -> None:
    files = described(tmp_path, *proto_files(), include=PROTOS)
    assert len(files) == len(proto_files())
    assert [name for file in files for name in undocumented(file)] == []


@needs_generator
def test_missing_doc_comment_is_found(tmp_path: Path) -> None:
    (tmp_path / "bare.proto").write_text(
        'syntax = "proto3"; package p;\n'
        "// Documented.\n"
        "message M {\n // Documented.\n int32 a = 1;\n optional int32 b = 2;\n oneof c { int32 d = 3; }\n"
        " message N {}\n}\n"
        "enum E { E_UNSPECIFIED = 0; }\n"
        "service S { rpc R(M) returns (M); }\n"
    )
    (file,) = described(tmp_path, "bare.proto", include=tmp_path)
    found = ["M.b", "M.d", "M.c", "N", "p.E", "p.E.E_UNSPECIFIED", "S", "S.R"]
    assert list(undocumented(file)) == [f"bare.proto: {name}" for name in found]
