"""References: what a client can change, who is believed, where the secret comes from."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from llm_datadist.errors import ParamError
from llm_datadist.integrations.references import ReferenceKeys, runtime_secret_file, secret_file
from tests.support.wire import new_secret, read_secrets

PAYLOAD = bytes(range(256))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return new_secret(tmp_path / "secrets", "one")


def test_a_reference_is_believed_with_the_same_secret_and_both_sides_have_one_token(file: Path) -> None:
    reference, token = ReferenceKeys(file).sign(PAYLOAD)
    assert ReferenceKeys(file).read(reference) == (PAYLOAD, token)
    assert len(token) == 16
    assert token.hex() not in reference
    assert ReferenceKeys(file).sign(PAYLOAD + b"x")[1] != token


def test_every_changed_character_is_refused(file: Path) -> None:
    keys = ReferenceKeys(file)
    reference, _ = keys.sign(PAYLOAD[:20])
    for place, letter in enumerate(reference):
        with pytest.raises(ParamError, match=r"^reference: "):
            keys.read(reference[:place] + ("0" if letter != "0" else "1") + reference[place + 1 :])
        with pytest.raises(ParamError, match=r"^reference: "):
            keys.read(reference[:place])


ODD: list[Any] = [None, 7, b"2", [], {"version": 1}, "", "....", "\ud800", "2." * 9, "\n", "2.0.x"]


def test_what_is_no_reference_is_refused(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A text longer than any reference is not looked at; a signed payload may be no base64."""
    keys: Any = ReferenceKeys(file)
    head, _, signature = keys.sign(PAYLOAD)[0].rpartition(".")
    with monkeypatch.context() as patch:
        patch.setattr("base64.urlsafe_b64encode", lambda payload: payload)
        no_base64 = [keys.sign(text)[0] for text in (b"A", b"AA=", b"AAAAA")]
    long = f"{head}{'A' * (1 << 21)}.{signature}"
    for odd, text in (
        *((odd, "") for odd in [*ODD, f"2.{'0' * 16}.\ud800AAA.{'0' * 64}"]),
        *((odd, "not of the form") for odd in no_base64),
        (long, "str: not a text of at most 2097152 characters$"),
    ):
        with pytest.raises(ParamError, match=f"^reference: {text}"):
            keys.read(odd)


def test_a_refusal_names_the_keys(file: Path, tmp_path: Path) -> None:
    other = new_secret(tmp_path / "other", "one")
    mine, theirs = read_secrets(file)[0].digest, read_secrets(other)[0].digest
    reference, _ = ReferenceKeys(other).sign(PAYLOAD)
    with pytest.raises(ParamError, match=f"key {theirs}: its key is not known here; believed keys: {mine}"):
        ReferenceKeys(file).read(reference)
    with pytest.raises(ParamError, match=f"key {mine}: its signature is wrong; believed keys: {mine}"):
        ReferenceKeys(file).read(reference.replace(theirs, mine))


def test_the_first_secret_signs_and_all_are_believed(file: Path, tmp_path: Path) -> None:
    keys, old = ReferenceKeys(file), ReferenceKeys(file).sign(PAYLOAD)
    later = new_secret(tmp_path / "later", "two")
    file.write_text(later.read_text() + file.read_text())
    assert keys.sign(PAYLOAD)[0].split(".")[1] == read_secrets(later)[0].digest
    assert keys.read(old[0]) == (PAYLOAD, old[1])
    file.write_text(later.read_text())
    with pytest.raises(ParamError, match="not known here"):
        keys.read(old[0])
    file.write_text("junk")
    assert keys.read(ReferenceKeys(later).sign(PAYLOAD)[0])[0] == PAYLOAD, "a bad file changes nothing"


def test_the_secret_of_the_links_signs_else_an_own_one(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    links = {"llm.AuthSecretFile": str(file)}
    assert secret_file(None, links) == (file, "llm.AuthSecretFile")
    assert secret_file(str(file), {}) == (file, "reference_secret_file")
    assert secret_file(str(file), {"llm.Insecure": "1"}) == (file, "reference_secret_file")
    for odd in ("/a\0b", "\ud800"):
        with pytest.raises(ParamError, match=r"reference_secret_file: .* NUL and lone surrogates are not allowed"):
            secret_file(odd, {})
    with pytest.raises(ParamError, match=r"reference_secret_file=.*llm\.AuthSecretFile signs"):
        secret_file(str(file), links)
    with pytest.raises(ParamError, match=r"reference_secret_file: not given: .*keys new"):
        secret_file(None, {"llm.Insecure": "1"})
    monkeypatch.setenv("LLM_DATADIST_INSECURE", "1")
    with pytest.raises(ParamError, match="reference_secret_file: not given"):
        secret_file(None, {})


def test_the_file_of_this_user_is_made_once_by_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    script = "from llm_datadist.integrations import references as r; p = r.runtime_secret_file(); print(p.read_text())"
    command = [sys.executable, "-c", script]
    started = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    assert len({each.communicate(timeout=60)[0] for each in started}) == 1
    path = runtime_secret_file()
    assert [entry.name for entry in path.parent.iterdir()] == ["references"]
    assert (path.parent.stat().st_mode & 0o777, path.stat().st_mode & 0o777) == (0o700, 0o600)


@pytest.mark.parametrize("wrong", ["mode", "link", "file", "owner"])
def test_a_folder_of_others_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: str) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    folder, other = tmp_path / "open-datadist", tmp_path / "other"
    other.mkdir(mode=0o700)
    if wrong == "link":
        folder.symlink_to(other)
    elif wrong == "file":
        folder.touch(0o700)
    else:
        folder.mkdir(0o755 if wrong == "mode" else 0o700)
    if wrong == "owner":
        if os.geteuid():
            pytest.skip("only root can give a folder to another user")
        os.chown(folder, 1001, 1001)
    with pytest.raises(ParamError, match=f"{folder}: not a folder of user {os.geteuid()} alone"):
        runtime_secret_file()
    assert list(other.iterdir()) == []


def test_without_a_temporary_folder_the_error_names_the_option_that_does_without_one(tmp_path: Path) -> None:
    script = "from llm_datadist.integrations import references as r; r.runtime_secret_file()"
    nowhere = f"import tempfile; tempfile._candidate_tempdir_list = lambda: [{str(tmp_path / 'none')!r}]; "
    environment = {name: value for name, value in os.environ.items() if name != "XDG_RUNTIME_DIR"}
    command = [sys.executable, "-c", nowhere + script]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=60)
    assert "ParamError: reference_secret_file: " in done.stderr
    assert "No usable temporary directory found in" in done.stderr
    assert done.stderr.endswith(
        "; set TMPDIR to a folder that this process may write; give a file or XDG_RUNTIME_DIR\n"
    )


def test_options_are_judged_as_the_workers_get_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    given = {"llm.EnableRemoteCacheAccessible": "1", "llm.Insecure": "0"}
    assert secret_file(None, given)[0].exists()
    assert caplog.messages == []
