"""What a shell completes after ``retrograd``: commands, and the options of each; else it completes names of files."""

from __future__ import annotations

from collections.abc import Sequence

from retrograd.core.launch.options import Command

_BASH = """\
_retrograd() {{
  local words
  case "${{COMP_WORDS[1]}}" in
{cases}
  *) words="" ;;
  esac
  [ "$COMP_CWORD" = 1 ] && words="{names}"
  case "${{COMP_WORDS[COMP_CWORD]}}" in -*) ;; *) [ "$COMP_CWORD" = 1 ] || words="" ;; esac
  COMPREPLY=($(compgen -W "$words" -- "${{COMP_WORDS[COMP_CWORD]}}"))
}}
complete -o default -F _retrograd retrograd
"""


def write_completion(commands: Sequence[type[Command]], shell: str) -> str:
    """The script that a shell reads: ``bash``, ``zsh`` or ``fish``."""
    words = {each.name: [name for option in each.options() for name in option.names] for each in commands}
    options = {command: [name for name in names if name.startswith("-")] for command, names in words.items()}
    if shell == "fish":
        return _write_fish(options)
    cases = "\n".join(f'  {command}) words="{" ".join(names)} --help" ;;' for command, names in options.items())
    script = _BASH.format(cases=cases, names=" ".join(options))
    return f"autoload -U +X bashcompinit && bashcompinit\n{script}" if shell == "zsh" else script


def _write_fish(options: dict[str, list[str]]) -> str:
    lines = [f"complete -c retrograd -n __fish_use_subcommand -a '{' '.join(options)}'"]
    for command, names in options.items():
        for name in names:
            kind = f"-l {name[2:]}" if name.startswith("--") else f"-s {name[1:]}"
            lines.append(f"complete -c retrograd -n '__fish_seen_subcommand_from {command}' {kind}")
    return "\n".join(lines) + "\n"
