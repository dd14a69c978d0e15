"""bench/lab/pack_peers.py: libraries with less code in them, and the one that replaces libxc."""

import ctypes
import shutil
import subprocess
import sys
import tarfile

import pytest
from places import ROOT

sys.path.insert(0, str(ROOT / "bench" / "lab"))
import pack_peers

MACHINE_CODE, PTX = 2, 1


def entry(kind, capability, code, header=64):
    """Of a fat binary."""
    return pack_peers.ENTRY.pack(kind, 257, header, len(code), capability).ljust(header, b"\x11") + code


def fat(*entries):
    code = b"".join(entries)
    return pack_peers.FAT.pack(0xBA55ED50, 1, pack_peers.FAT.size, len(code)) + code


def test_one_capability_is_kept():
    kept = entry(MACHINE_CODE, 90, b"ninety" * 8), entry(MACHINE_CODE, 90, b"again" * 8, header=80)
    others = entry(PTX, 90, b"text" * 4), entry(MACHINE_CODE, 80, b"eighty" * 8), entry(MACHINE_CODE, 120, b"new" * 8)
    first, second = fat(others[0], kept[0], others[1], kept[1]), fat(others[2], kept[0])
    data = b"before" + first + b"between" + second + b"behind"
    found = pack_peers.pruned(data, 90)
    assert len(found) == len(data)
    start, then = fat(*kept), fat(kept[0])
    assert found == b"before" + start.ljust(len(first), b"\0") + b"between" + then.ljust(len(second), b"\0") + b"behind"
    assert pack_peers.pruned(found, 90) == found


def test_a_library_without_code_stays():
    assert pack_peers.pruned(b"no code for a GPU", 90) == b"no code for a GPU"


def test_no_code_for_the_capability():
    with pytest.raises(SystemExit, match="compute capability 100"):
        pack_peers.pruned(fat(entry(MACHINE_CODE, 90, b"code")), 100)


def test_another_format():
    data = bytearray(fat(entry(MACHINE_CODE, 90, b"code" * 9), entry(MACHINE_CODE, 90, b"code" * 9)))
    pack_peers.FAT.pack_into(data, 0, 0xBA55ED50, 1, pack_peers.FAT.size, len(data) - pack_peers.FAT.size - 8)
    with pytest.raises(SystemExit, match="another format"):
        pack_peers.pruned(bytes(data) + bytes(99), 90)


@pytest.mark.skipif(not shutil.which("cc"), reason="needs a C compiler")
def test_stubs(tmp_path):
    """They answer on import that there are no functionals, and end the process with a message when one is used."""
    for name in pack_peers.USERS_OF_LIBXC:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"\0xc_gga\0_libxc.xc_func_init() xc_version_string")
    pack_peers.make_stubs(tmp_path)
    for name in pack_peers.STUBBED:
        library = ctypes.CDLL(str(tmp_path / name))
        library.xc_version_string.restype = ctypes.c_char_p
        assert library.xc_version_string() == b"left out"
        assert library.xc_number_of_functionals() == 0
        assert library.xc_gga
        code = f"import ctypes; ctypes.CDLL({str(tmp_path / name)!r}).xc_func_init()"
        ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        assert ended.returncode < 0
        assert ended.stderr == "xc_func_init: bench/lab/pack_peers.py has left libxc out.\n"


def test_unpacking(tmp_path, monkeypatch, capsys):
    source, folder, library = tmp_path / "module.py", tmp_path / "there", tmp_path / "libcusolver.so.12"
    source.write_text("answer = 42\n")
    library.touch()
    with tarfile.open(tmp_path / "pack.tar.xz", "w:xz") as archive:
        archive.add(source, "package/module.py")
    monkeypatch.setattr(pack_peers, "PACK", tmp_path / "pack.tar.xz")
    monkeypatch.setattr(pack_peers, "cusolver", lambda: library)
    for _ in range(2):
        pack_peers.unpack(folder)
        assert capsys.readouterr().out == f"{folder}:{ROOT}\n"
    assert (folder / "package" / "module.py").read_text() == "answer = 42\n"
    assert (folder / "nvidia" / "cusolver" / "lib" / "libcusolver.so").resolve() == library


def test_unpacking_where_cusolver_is_not_found(tmp_path, monkeypatch, capsys):
    def missing():
        raise RuntimeError("no such library")

    with tarfile.open(tmp_path / "pack.tar.xz", "w:xz"):
        pass
    monkeypatch.setattr(pack_peers, "PACK", tmp_path / "pack.tar.xz")
    monkeypatch.setattr(pack_peers, "cusolver", missing)
    pack_peers.unpack(tmp_path / "there")
    told = capsys.readouterr()
    assert told.out == f"{tmp_path / 'there'}:{ROOT}\n"
    assert "no such library" in told.err
