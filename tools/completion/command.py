"""Completion by TAB: flags, settings and their values, recipes, data sets, model names.

    python scripts/completion.py bash >> ~/.bashrc
    python scripts/completion.py zsh  >> ~/.zshrc             # below the line with compinit
    python scripts/completion.py fish > ~/.config/fish/conf.d/vitamp.fish

It works for main_single_gpu.py, main_multi_gpu.py and the tools in scripts/, started as `python FILE ...`, and for the
first two also as `./FILE ...` and behind `torchrun`. What it offers is always that of the files in this folder.

Exit codes: 0 done, 2 anything wrong with the command.
"""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

from tools.common.command_line import Tool, run_tool
from tools.completion.table import ENTRIES
from utils.errors import EXIT_DONE
from utils.flags import Place

ROOT = Path(__file__).resolve().parents[2]
BASH = """\
# Completion for vitamp in bash; made by scripts/completion.py
for _vitamp_load in _comp_load _completion_loader; do
    declare -F $_vitamp_load >/dev/null && $_vitamp_load python >/dev/null 2>&1
done
if [[ $(complete -p python 2>/dev/null) =~ -F\\ ([^ ]+) && ${BASH_REMATCH[1]} != _vitamp ]]; then
    _vitamp_before=${BASH_REMATCH[1]}
fi
_vitamp() {
    local line=${COMP_LINE:0:COMP_POINT} found word about
    local -a words
    read -ra words <<<"$line"
    [[ $line == *[[:space:]] ]] && words+=("")
    COMPREPLY=()
    if ! found=$(@ASK@ "${words[@]}" 2>/dev/null); then
        [[ ${words[0]##*/} == python* && $_vitamp_before ]] && $_vitamp_before "$@"
        return
    fi
    compopt +o default +o bashdefault 2>/dev/null
    # What stands before the last = or : bash takes for words of their own.
    local current=${words[-1]} kept=""
    [[ $COMP_WORDBREAKS == *:* && $current == *:* ]] && kept=${current%:*}:
    [[ $COMP_WORDBREAKS == *=* && $current == *=* && -z $kept ]] && kept=${current%"${current##*=}"}
    while IFS=$'\\t' read -r word about; do
        [[ $word ]] || continue
        [[ $word == *[=/] ]] && compopt -o nospace 2>/dev/null
        printf -v word %q "${word#"$kept"}"
        COMPREPLY+=("${word/#\\\\~/~}")
    done <<<"$found"
}
complete -o default -o bashdefault -F _vitamp @COMMANDS@
"""

ZSH = """\
# Completion for vitamp in zsh; made by scripts/completion.py
_vitamp() {
    local found line word
    local -a ends ends_shown goes_on goes_on_shown
    found=$(@ASK@ "${(@Q)words[1,CURRENT-1]}" "${(Q)PREFIX}" 2>/dev/null)
    if (( $? )); then
        if [[ ${words[1]:t} == python* ]] && (( $+functions[_python] )); then _python "$@"; else _files; fi
        return
    fi
    for line in ${(f)found}; do
        word=${line%%$'\\t'*}
        if [[ $word == *[=/] ]]; then
            goes_on+=("$word") goes_on_shown+=("${word}  ${line#*$'\\t'}")
        else
            ends+=("$word") ends_shown+=("${word}  ${line#*$'\\t'}")
        fi
    done
    local -i added=1
    (( $#goes_on )) && compadd -l -S '' -d goes_on_shown -a goes_on && added=0
    (( $#ends )) && compadd -l -d ends_shown -a ends && added=0
    return added
}
compdef _vitamp @COMMANDS@
"""

FISH = """\
# Completion for vitamp in fish; made by scripts/completion.py
function __vitamp_words
    set -l begun (commandline -ct)
    @ASK@ (commandline -opc) "$begun" 2>/dev/null
end
function __vitamp_meant
    string match -qr '(^|/)(@PROGRAMS@)$' -- (commandline -opc)
end
for command in @COMMANDS@
    complete -c $command -f -n __vitamp_meant -a '(__vitamp_words)'
end
"""

SHELLS = {"bash": BASH, "zsh": ZSH, "fish": FISH}
PLACES = (Place("shell", "SHELL", "bash, zsh or fish", choices=tuple(SHELLS)),)
TOOL = Tool("completion.py", __doc__, (), PLACES, settings=False)


def main(argv: list[str]) -> int:
    return run_tool(_work, argv)


def _work(argv: list[str]) -> int:
    print(script_for(TOOL.read(argv).asked.shell), end="")
    return EXIT_DONE


def script_for(shell: str) -> str:
    ask = f"{shlex.quote(sys.executable)} -I -S {shlex.quote(str(ROOT / 'tools' / 'completion' / 'words.py'))}"
    tools = [*ENTRIES, *sorted(path.name for path in (ROOT / "scripts").glob("*.py"))]
    python = f"python{sys.version_info.major}.{sys.version_info.minor}"
    commands = ["python", "python3", python, "torchrun", *ENTRIES]
    words = {"@ASK@": ask, "@COMMANDS@": " ".join(commands), "@PROGRAMS@": "|".join(tools).replace(".", "\\.")}
    text = SHELLS[shell]
    for mark, value in words.items():
        text = text.replace(mark, value)
    return text
