"""Shell completion of flags, settings, their values, recipes, data sets and model names.

    python scripts/completion.py bash >> ~/.bashrc
    python scripts/completion.py zsh  >> ~/.zshrc             # below the line with compinit
    python scripts/completion.py fish > ~/.config/fish/conf.d/vitamp.fish

Prints the completion script for a shell. It completes `python FILE ...` for main_single_gpu.py, main_multi_gpu.py and
the tools in scripts/, and for the first two also `./FILE ...` and `torchrun ...`. It reads the flags from this folder,
so it never needs an update.

Exit codes: 0 done, 2 anything wrong with the command.
"""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

from tools.common.command_line import Tool, run_tool
from tools.completion.table import ENTRIES
from utils.errors import EXIT_DONE
from utils.flags import Positional

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
    # bash splits words at = and :, so it completes only the part after the last one.
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
    local -a whole whole_shown open open_shown
    found=$(@ASK@ "${(@Q)words[1,CURRENT-1]}" "${(Q)PREFIX}" 2>/dev/null)
    if (( $? )); then
        if [[ ${words[1]:t} == python* ]] && (( $+functions[_python] )); then _python "$@"; else _files; fi
        return
    fi
    for line in ${(f)found}; do
        word=${line%%$'\\t'*}
        if [[ $word == *[=/] ]]; then
            open+=("$word") open_shown+=("${word}  ${line#*$'\\t'}")
        else
            whole+=("$word") whole_shown+=("${word}  ${line#*$'\\t'}")
        fi
    done
    local -i added=1
    (( $#open )) && compadd -l -S '' -d open_shown -a open && added=0
    (( $#whole )) && compadd -l -d whole_shown -a whole && added=0
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
function __vitamp_is_ours
    string match -qr '(^|/)(@PROGRAMS@)$' -- (commandline -opc)
end
for command in @COMMANDS@
    complete -c $command -f -n __vitamp_is_ours -a '(__vitamp_words)'
end
"""

SHELLS = {"bash": BASH, "zsh": ZSH, "fish": FISH}
PLACES = (Positional("shell", "SHELL", "bash, zsh or fish", choices=tuple(SHELLS)),)
TOOL = Tool("completion.py", __doc__, (), PLACES, settings=False)


def main(argv: list[str]) -> int:
    return run_tool(_print_script, argv)


def _print_script(argv: list[str]) -> int:
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
