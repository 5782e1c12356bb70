"""Chooses the files of a bundle: possible secrets, caches and ignored files stay on this machine.

Invariant: a file whose name or content looks like a secret is included only if `include` names it exactly. `.gitignore`
files are read as git reads them, including those above the folder up to the repository's root; `.fulmenignore` files
have the same syntax and are read after them, so that they can include a file that git ignores.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Final

from pathspec import GitIgnoreSpec, RegexPattern

from fulmen.train_toml.train import ConfigError

__all__ = ["SECRET", "LeftOut", "Selection", "choose_files", "require_no_secrets"]

CANNOT_PACK: Final = "The agent's folder cannot be packed; nothing was created."

GITIGNORE: Final = ".gitignore"
IGNORE_FILES: Final = (GITIGNORE, ".fulmenignore")
MAX_IGNORE_BYTES: Final = 1024 * 1024
SCANNED_PIECE_BYTES: Final = 1024 * 1024
# Longer than any pattern's match, so that none is lost between two pieces.
SCANNED_OVERLAP_BYTES: Final = 512

SECRET: Final = "may contain secrets"  # noqa: S105  # A reason.
CACHE: Final = "a cache, or installed software"

_SECRET_NAMES: Final = GitIgnoreSpec.from_lines(
    [
        ".env*",
        "*.env",
        "*.pem",
        "*.key",
        "*.p12",
        "*.pfx",
        "*.p8",
        "*.jks",
        "*.keystore",
        "*.ppk",
        "*.kdbx",
        "*.crt",
        "*.cer",
        "*.der",
        "*.tfstate",
        "*.tfstate.backup",
        "*.kubeconfig",
        "id_rsa*",
        "id_dsa*",
        "id_ecdsa*",
        "id_ed25519*",
        "kubeconfig*",
        ".ssh",
        ".aws",
        ".azure",
        ".gnupg",
        ".kube",
        ".docker",
        ".gcloud",
        ".config/gcloud",
        ".git-credentials",
        ".htpasswd",
        ".my.cnf",
        ".netrc",
        "_netrc",
        ".npmrc",
        ".pgpass",
        ".pypirc",
        ".vault-token",
        "client_secret*.json",
        "credentials.json",
        "service-account*.json",
        "service_account*.json",
        "secrets.json",
        "secrets.toml",
        "secrets.yaml",
        "secrets.yml",
    ]
)
_CACHE_NAMES: Final = GitIgnoreSpec.from_lines(
    [
        ".git",
        ".hg",
        ".svn",
        ".fulmen",
        ".venv",
        "venv",
        "node_modules",
        "__pycache__",
        "*.pyc",
        "*.pyo",
        "*.swp",
        ".cache",
        ".eggs",
        ".idea",
        ".ipynb_checkpoints",
        ".mypy_cache",
        ".nox",
        ".pytest_cache",
        ".ruff_cache",
        ".terraform",
        ".tox",
        ".vscode",
        ".DS_Store",
        "Thumbs.db",
        "wandb/",
    ]
)
_VIRTUAL_ENVIRONMENT: Final = "pyvenv.cfg"

_SECRET_CONTENT: Final = {
    "a private key": rb"-----BEGIN (?:[A-Z0-9]+ )*PRIVATE KEY(?: BLOCK)?-----",
    "an Anthropic key": rb"sk-ant-[A-Za-z0-9_-]{20,}",
    "an OpenAI key": rb"sk-(?:proj-|svcacct-|admin-)?[A-Za-z0-9_-]{32,}",
    "an AWS access key": rb"(?:AKIA|ASIA)[0-9A-Z]{16}(?![0-9A-Za-z])",
    "a GitHub token": rb"(?:gh[pousr]_[A-Za-z0-9]{36}|github_pat_[A-Za-z0-9_]{50,})",
    "a GitLab token": rb"glpat-[A-Za-z0-9_-]{20,}",
    "a Google API key": rb"AIza[0-9A-Za-z_-]{35}",
    "a Hugging Face token": rb"hf_[A-Za-z0-9]{34,}",
    "a Slack token": rb"xox[abprs]-[A-Za-z0-9-]{20,}",
    "a Stripe key": rb"[rs]k_live_[0-9A-Za-z]{24,}",
    "an npm token": rb"npm_[A-Za-z0-9]{36}",
    "a PyPI token": rb"pypi-AgE[A-Za-z0-9_-]{50,}",
}
_CONTENT: Final = re.compile(
    rb"(?<![A-Za-z0-9_-])(?:"
    + b"|".join(b"(?P<g%d>%b)" % (number, text) for number, text in enumerate(_SECRET_CONTENT.values()))
    + rb")"
)
_WHAT: Final = tuple(_SECRET_CONTENT)


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOut:
    """A file or folder that stays outside; `why` is for a person."""

    name: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """The files of a bundle by name, and what was left out."""

    files: dict[str, Path]
    left_out: tuple[LeftOut, ...]


def choose_files(folder: Path, *, include: Sequence[str] = ()) -> Selection:
    """Returns the files of a folder that belong in a bundle.

    Args:
        folder: What is packed, resolved; links in it must stay inside it.
        include: Patterns, as in a `.gitignore`, of files to take although they are ignored or in a cache; possible
            secrets are included only if their exact path is listed.

    Raises:
        ConfigError: If links lead out of the folder, or folders cannot be read; lists all of them.
    """
    walk = _Walk(folder=folder, include=tuple(include))
    walk.enter(folder, "", walk.rules_above())
    if walk.problems:
        raise ConfigError(CANNOT_PACK, walk.problems)
    return Selection(files=dict(sorted(walk.files.items())), left_out=tuple(walk.left_out))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rules:
    """An ignore file.

    Attributes:
        spec: Its patterns, for paths below `base`.
        base: Path of its folder from the repository's root, with a slash; empty for the root.
        source: The file, for a person.
        wins: Whether it is read after the others.
    """

    spec: GitIgnoreSpec
    base: str
    source: str
    wins: bool


def _ignored(path: str, rules: tuple[_Rules, ...]) -> str:
    """Returns why a path is ignored; empty if it is not. The last matching pattern of the deepest file decides."""
    deepest_first = rules[::-1]
    for rule in (*(each for each in deepest_first if each.wins), *(each for each in deepest_first if not each.wins)):
        verdict = _verdict(rule.spec, path.removeprefix(rule.base))
        if verdict is not None:
            return f"ignored by {rule.source}" if verdict else ""
    return ""


def _verdict(spec: GitIgnoreSpec, path: str) -> bool | None:
    """Returns whether the last pattern that matches a path ignores it; None if none matches.

    Unlike git, pathspec also lets a pattern decide that matches only a folder above the path, so that `!/b` would take back
    `b/x.log`. Folders above have been decided on before.
    """
    for pattern in reversed(spec.patterns):
        if isinstance(pattern, RegexPattern) and pattern.regex is not None:
            for match in pattern.regex.finditer(path):
                if match.groupdict().get("ps_d") is None or match.end("ps_d") == len(path):
                    return pattern.include
    return None


@dataclass(slots=True, kw_only=True)
class _Walk:
    """One walk over a folder. Rules use paths from the repository's root, if there is one; everything else uses paths
    from the folder."""

    folder: Path
    include: tuple[str, ...]
    files: dict[str, Path] = field(default_factory=dict)
    left_out: list[LeftOut] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    _prefix: str = ""

    def rules_above(self) -> tuple[_Rules, ...]:
        """Returns the rules between the repository's root and the folder, the root's first.

        None if they ignore the whole folder: they then do not apply to its files.
        """
        root = next((each for each in (self.folder, *self.folder.parents) if (each / ".git").exists()), self.folder)
        self._prefix = _slashed(self.folder.relative_to(root))
        between = [each for each in reversed(self.folder.parents) if each.is_relative_to(root)]
        rules = tuple(rule for each in between for rule in self._rules(each, _slashed(each.relative_to(root))))
        return rules if not self._prefix or not _ignored(self._prefix, rules) else ()

    def enter(self, place: Path, name: str, rules: tuple[_Rules, ...], *, why: str = "") -> None:
        """Chooses among the entries of a folder.

        Args:
            place: The folder.
            name: Its path with a slash; empty for the first.
            rules: Rules of the folders above it.
            why: Why the folder itself is left out; only files that `include` names are then included.
        """
        rules = (*rules, *self._rules(place, self._prefix + name))
        try:
            entries = sorted(place.iterdir(), key=lambda each: each.name)
        except PermissionError:
            self.problems.append(f"{place}: cannot be read; make it readable, or name it in .fulmenignore")
            return
        for entry in entries:
            is_folder = entry.is_dir() and not entry.is_symlink()
            if not is_folder and not entry.is_symlink() and not entry.is_file():
                continue
            path = f"{name}{entry.name}/" if is_folder else f"{name}{entry.name}"
            reason = why or self._why_not(entry, path, rules)
            if reason and self._is_included(path, is_secret=reason == SECRET):
                reason = ""
            if reason and not why:
                self.left_out.append(LeftOut(name=path, why=reason))
            if is_folder and (not reason or self._names_below(path)):
                self.enter(entry, path, rules, why=reason)
            elif not is_folder and not reason:
                self._take(entry, path)

    def _is_included(self, path: str, *, is_secret: bool) -> bool:
        if is_secret:
            return _names(self.include, path)
        return GitIgnoreSpec.from_lines(self.include).match_file(path)

    def _names_below(self, path: str) -> bool:
        """Returns True if `include` names something in a folder that is left out."""
        return any(each.removeprefix("/").startswith(path) for each in self.include)

    def _why_not(self, entry: Path, path: str, rules: tuple[_Rules, ...]) -> str:
        """Returns why a path is left out; empty if it is included. A folder's path ends with a slash."""
        if _is_secret(path):
            return SECRET
        if _CACHE_NAMES.match_file(path) or (entry / _VIRTUAL_ENVIRONMENT).is_file():
            return CACHE
        return _ignored(self._prefix + path, rules)

    def _rules(self, place: Path, base: str) -> Iterator[_Rules]:
        for name in IGNORE_FILES:
            file = place / name
            if not file.is_file() or file.is_symlink():
                continue
            lines = file.read_bytes()[:MAX_IGNORE_BYTES].decode(errors="replace").removeprefix("\ufeff").splitlines()
            shown = file.relative_to(self.folder).as_posix() if file.is_relative_to(self.folder) else str(file)
            yield _Rules(spec=GitIgnoreSpec.from_lines(lines), base=base, source=shown, wins=name != GITIGNORE)

    def _take(self, entry: Path, path: str) -> None:
        if entry.is_symlink():
            target = entry.resolve()
            if not target.is_relative_to(self.folder) or target.is_dir():
                text = f"{entry}: a link to {target}; only links to files inside the directory can be packed"
                self.problems.append(text)
                return
            inside = target.relative_to(self.folder).as_posix()
            is_secret = _is_secret(inside)
            if (is_secret or _CACHE_NAMES.match_file(inside)) and not self._is_included(path, is_secret=is_secret):
                why = f"which {SECRET}" if is_secret else f"in {CACHE}"
                self.left_out.append(LeftOut(name=path, why=f"a link to {inside}, {why}"))
                return
        if entry.is_file():
            self.files[path] = entry


def require_no_secrets(files: Mapping[str, Path], *, include: Sequence[str] = ()) -> None:
    """Checks that no file's content looks like a secret, except files that `include` names.

    Raises:
        ConfigError: If one does; lists all of them by line, without the secret.
    """
    problems = [
        f"{name}, line {found[0]}: looks like {found[1]}. Give it to the agent with `fulmen secret set`, ignore the file "
        f'in .fulmenignore, or, if it is not a secret, add `include = ["{name}"]` to [agent]'
        for name, path in files.items()
        if not _names(include, name) and (found := _secret_in(path))
    ]
    if problems:
        raise ConfigError(CANNOT_PACK, problems)


def _is_secret(path: str) -> bool:
    """Returns True if the name of a file or folder is typical of secrets, ignoring case."""
    return _SECRET_NAMES.match_file(path.lower())


def _secret_in(path: Path) -> tuple[int, str] | None:
    """Returns the line and the kind of the first secret in a file."""
    line, tail = 1, b""
    with path.open("rb") as file:
        while piece := file.read(SCANNED_PIECE_BYTES):
            text = tail + piece
            if match := _CONTENT.search(text):
                return line + text.count(b"\n", 0, match.start()), _WHAT[int((match.lastgroup or "g0")[1:])]
            tail = text[-SCANNED_OVERLAP_BYTES:]
            line += text.count(b"\n", 0, len(text) - len(tail))
    return None


def _names(include: Sequence[str], path: str) -> bool:
    return path in include or f"/{path}" in include


def _slashed(path: PurePath) -> str:
    return "" if path == PurePath() else f"{path.as_posix()}/"
