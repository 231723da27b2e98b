"""`check_onnx`: files of others, and what they may not do."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from headwise.export import check_onnx

pytestmark = pytest.mark.export


def model(weight=None, opset=20, domain=""):
    """y = x + w."""
    weight = numpy_helper.from_array(np.arange(4, dtype=np.float32), "w") if weight is None else weight
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", 4]) for name in "xy"]
    graph = helper.make_graph([helper.make_node("Add", ["x", "w"], ["y"])], "g", values[:1], values[1:], [weight])
    return helper.make_model(
        graph, opset_imports=[helper.make_opsetid(domain, opset)], ir_version=10, producer_name="somebody"
    )


def away(location, offset=0, length=16):
    """A weight whose numbers lie in another file."""
    weight = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[4], data_location=TensorProto.EXTERNAL)
    for key, value in (("location", location), ("offset", offset), ("length", length)):
        weight.external_data.add(key=key, value=str(value))
    return weight


def saved(folder, made):
    path = folder / "model.onnx"
    path.write_bytes(made.SerializeToString())
    return path


def test_one_file(tmp_path):
    path = saved(tmp_path, model())
    found = check_onnx(path)
    assert (found.opset, found.producer, found.operators) == (20, "somebody", {"Add": 1})
    assert [str(value) for value in found.inputs] == ["x float (batch, 4)"]
    assert found.bytes == path.stat().st_size
    assert str(found).startswith(f"{path}: ONNX opset 20, by somebody, ")


def test_weights_beside_it(tmp_path):
    (tmp_path / "more").mkdir()
    data = tmp_path / "more" / "weights.bin"
    data.write_bytes(np.arange(8, dtype=np.float32).tobytes())
    path = saved(tmp_path, model(away("more/weights.bin", offset=16)))
    found = check_onnx(path)
    assert [file.resolve() for file in found.files] == [path.resolve(), data.resolve()]
    assert found.bytes == path.stat().st_size + 32


@pytest.mark.parametrize("place", ["/etc/passwd", "../secret.bin", "more/../../secret.bin", "", "..\\secret.bin"])
def test_weights_elsewhere(tmp_path, place):
    folder = tmp_path / "folder"
    (folder / "more").mkdir(parents=True)
    (tmp_path / "secret.bin").write_bytes(b"0" * 64)
    with pytest.raises(ValueError, match=r"check_onnx: path must keep its weights in its own folder: .* put them"):
        check_onnx(saved(folder, model(away(place))))


@pytest.mark.parametrize("inside", [True, False])
def test_weights_behind_a_link(tmp_path, inside):
    folder = tmp_path / "folder"
    folder.mkdir()
    real = (folder if inside else tmp_path) / "secret.bin"
    real.write_bytes(b"0" * 64)
    (folder / "weights.bin").symlink_to(real)
    with pytest.raises(ValueError, match="keep its weights in its own folder"):
        check_onnx(saved(folder, model(away("weights.bin"))))


def test_weights_in_a_constant_of_a_branch(tmp_path):
    """They are looked for everywhere, not in the list of weights alone."""
    node = helper.make_node("Constant", [], ["c"], value=away("../secret.bin"))
    value = helper.make_tensor_value_info("c", TensorProto.FLOAT, [4])
    branch = helper.make_graph([node], "b", [], [value])
    made = model()
    made.graph.node.append(helper.make_node("If", ["x"], ["z"], then_branch=branch, else_branch=branch))
    with pytest.raises(ValueError, match="keep its weights in its own folder"):
        check_onnx(saved(tmp_path, made))


@pytest.mark.parametrize(("offset", "length"), [(0, 32), (8, 16), (-1, 4), ("a", 4)])
def test_weights_cut_off(tmp_path, offset, length):
    (tmp_path / "weights.bin").write_bytes(b"0" * 16)
    with pytest.raises(ValueError, match="come with whole files; copy them again"):
        check_onnx(saved(tmp_path, model(away("weights.bin", offset, length))))


def test_weights_missing(tmp_path):
    with pytest.raises(ValueError, match=r"come with all of its files; .*without 'weights.bin'"):
        check_onnx(saved(tmp_path, model(away("weights.bin"))))


@pytest.mark.parametrize("content", [b"", b"hello, this is a text", b"\x80\x00\x01", b"PK\x03\x04" + b"\0" * 40])
def test_no_model(tmp_path, content):
    path = tmp_path / "model.onnx"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="check_onnx: path must be an ONNX model"):
        check_onnx(path)


def test_no_file(tmp_path):
    with pytest.raises(ValueError, match=r"path must be a file; got .*, a folder"):
        check_onnx(tmp_path)
    with pytest.raises(ValueError, match=r"path must be a file; got .*none.onnx, which is not there"):
        check_onnx(tmp_path / "none.onnx")
    with pytest.raises(ValueError, match=r"path must be the path of a file; got None"):
        check_onnx(None)


def test_file_that_cannot_be_read(tmp_path, monkeypatch):
    """It is not said to be no model."""

    def refuse(self):
        raise PermissionError("not yours")

    path = saved(tmp_path, model())
    monkeypatch.setattr(type(path), "read_bytes", refuse)
    with pytest.raises(ValueError, match=r"check_onnx: path must be a file that can be read; got .*: not yours"):
        check_onnx(path)


@pytest.mark.parametrize("opset", [1, 6, onnx.defs.onnx_opset_version() + 1])
def test_opset(tmp_path, opset):
    with pytest.raises(ValueError, match=rf"path must be of opset 7 to \d+; .*of opset {opset}"):
        check_onnx(saved(tmp_path, model(opset=opset)))


def test_no_opset(tmp_path):
    with pytest.raises(ValueError, match="say which opset of ONNX it needs"):
        check_onnx(saved(tmp_path, model(domain="com.somebody")))


def test_refused_by_the_checker(tmp_path):
    made = model()
    made.graph.node[0].input[1] = "nowhere"
    with pytest.raises(ValueError, match="be a model that onnx's checker takes"):
        check_onnx(saved(tmp_path, made))


def test_weights_shorter_than_their_shape(tmp_path):
    """Also where the file says no length."""
    (tmp_path / "weights.bin").write_bytes(b"0" * 16)
    for size, length in ((100, 16), (4, 8), (100, None)):
        weight = away("weights.bin", length=length or 0)
        weight.dims[0] = size
        if length is None:
            del weight.external_data[2]
        with pytest.raises(ValueError, match="come with whole files; copy them again"):
            check_onnx(saved(tmp_path, model(weight)))


def test_weights_in_what_is_easily_overlooked(tmp_path):
    """What functions take by default, and what training needs."""
    made = model()
    made.functions.add(name="f", domain="mine").attribute_proto.append(helper.make_attribute("v", away("../s.bin")))
    with pytest.raises(ValueError, match="keep its weights in its own folder"):
        check_onnx(saved(tmp_path, made))
    for part in ("initialization", "algorithm"):
        made = model()
        getattr(made.training_info.add(), part).initializer.append(away("/etc/passwd"))
        with pytest.raises(ValueError, match="keep its weights in its own folder"):
            check_onnx(saved(tmp_path, made))


@pytest.mark.parametrize(
    ("place", "message"),
    [("a\0b", "in its own folder"), ("l" * 300, "in its own folder"), ("model.onnx", "inside or in another file")],
)
def test_weights_at_no_place(tmp_path, place, message):
    with pytest.raises(ValueError, match=f"check_onnx: path must keep .*{message}"):
        check_onnx(saved(tmp_path, model(away(place))))


def test_twice(tmp_path):
    """What is said twice, readers take differently."""
    made = model()
    made.opset_import.append(helper.make_opsetid("ai.onnx", 19))
    with pytest.raises(ValueError, match="say once which opset"):
        check_onnx(saved(tmp_path, made))
    (tmp_path / "weights.bin").write_bytes(b"0" * 16)
    weight = away("weights.bin")
    weight.external_data.add(key="location", value="/etc/passwd")
    with pytest.raises(ValueError, match="say once where a weight lies"):
        check_onnx(saved(tmp_path, model(weight)))


def test_no_type(tmp_path):
    made = model()
    made.graph.input[0].type.tensor_type.elem_type = 99
    with pytest.raises(ValueError, match=r"check_onnx: path must "):
        check_onnx(saved(tmp_path, made))


@pytest.mark.parametrize("name", ["l" * 300, "a\0b"])
def test_path_that_no_file_has(tmp_path, name):
    with pytest.raises(ValueError, match=r"check_onnx: path must be a"):
        check_onnx(tmp_path / name)
