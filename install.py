"""Makes Panax's environment in .venv, so that nothing of the system's Python changes. Run it again at any time.

    python3 install.py            what training takes
    python3 install.py test       what the tests take too

What is there already is left as it is. pip reads its own configuration. Nothing here needs a new Python to be parsed, so that
an old one can say what is wrong.
"""

import hashlib
import os
import platform
import subprocess
import sys

ROOT = os.path.dirname(os.path.realpath(__file__))
OLDEST = (3, 11)

KINDS = {"run": (".", ("run",)), "test": (".[test]", ("test", "run"))}
"""What can be installed: the project with its extras, and the kinds that it holds."""


def refusal(version, system, machine, modules):
    """Why Panax can't be installed here, in one sentence; empty where it can."""
    if version < OLDEST:
        return (
            "Panax needs Python %d.%d or newer, and this is %d.%d (%s); run `python3.12 install.py`, or another new one"
            % (OLDEST + tuple(version[:2]) + (sys.executable,))
        )
    if system == "Windows":
        return "Panax runs on Linux and macOS; on Windows, install WSL (`wsl --install`) and run this in its terminal"
    if (system, machine) == ("Darwin", "x86_64"):
        return "JAX is not made for Macs with an Intel processor; use one with Apple silicon (and its own Python), or Linux"
    if modules:
        return (
            "this Python lacks %s, which Debian and Ubuntu package separately; run `sudo apt install python%d.%d-venv`"
            % (
                " and ".join(modules),
                version[0],
                version[1],
            )
        )
    return ""


def missing_modules():
    """The modules of Python's own that an environment takes and that are not here."""
    missing = []
    for name in ("venv", "ensurepip"):
        try:
            __import__(name)
        except ImportError:
            missing.append(name)
    return missing


class Environment:
    """A virtual environment of this folder.

    Attributes:
        python: Its interpreter.
    """

    def __init__(self, folder):
        self.folder = os.path.abspath(folder)
        self.python = os.path.join(self.folder, "bin", "python")

    def stamp(self, kind):
        """The file that says what was installed."""
        return os.path.join(self.folder, "panax-" + kind + ".txt")

    def wanted(self):
        """What a stamp must hold: which clone was installed, and with what."""
        digest = hashlib.sha256()
        for name in ["pyproject.toml"] + ["requirements/%s.txt" % each for each in sorted(KINDS)]:
            with open(os.path.join(ROOT, name), "rb") as file:
                digest.update(file.read())
        return "%s\n%s\n" % (ROOT, digest.hexdigest())

    def works(self, *imports):
        """Whether its Python starts and imports modules."""
        code = "import sys\nfor name in %r: __import__(name)\nsys.exit(sys.version_info < %r)" % (imports, OLDEST)
        try:
            with open(os.devnull, "w") as nothing:
                return subprocess.call([self.python, "-c", code], stdout=nothing, stderr=nothing) == 0
        except OSError:
            return False

    def moved(self):
        """Whether it was made at another path: its scripts would start what lies there."""
        script = read(os.path.join(self.folder, "bin", "activate"))
        return self.folder not in script and os.path.realpath(self.folder) not in script

    def ready(self, kind):
        """Whether all that `kind` takes is there."""
        held = [each for each in KINDS if kind in KINDS[each][1]]
        return (
            any(read(self.stamp(each)) == self.wanted() for each in held) and not self.moved() and self.works("panax")
        )

    def make(self):
        """Make it where it is missing, does not work, or was moved."""
        if os.path.isfile(os.path.join(self.folder, "pyvenv.cfg")):
            if self.works("pip") and not self.moved():
                return
            say("making %s again: it does not work here" % shown(self.folder))
        elif os.path.isdir(self.folder) and os.listdir(self.folder):
            sys.exit("install.py: %s is not a virtual environment; move it away" % self.folder)
        else:
            say("making %s with Python %s" % (shown(self.folder), platform.python_version()))
        run([sys.executable, "-m", "venv", "--clear", self.folder], "could not make %s" % self.folder)

    def install(self, kind):
        """Install what `kind` takes, with its stamp written last."""
        for each in KINDS:
            if os.path.exists(self.stamp(each)):
                os.remove(self.stamp(each))
        requirements = os.path.join("requirements", kind + ".txt")
        count = sum("==" in line and not line.startswith((" ", "#")) for line in read(requirements).split("\n"))
        say("installing the %d packages of %s; this takes minutes where they must be fetched" % (count, requirements))
        pip = [self.python, "-m", "pip", "install", "--quiet"]
        advice = "pip could not install %s; see above what it says, then run the same command again" % requirements
        run(pip + ["-r", requirements], advice)
        run(pip + ["--no-build-isolation", "-e", KINDS[kind][0]], advice)
        with open(self.stamp(kind), "w") as file:
            file.write(self.wanted())


def read(path):
    """The text of a file; empty where there is none."""
    if not os.path.isfile(path):
        return ""
    with open(path) as file:
        return file.read()


def run(command, failed):
    """Run a command in the project's folder; end with a sentence where it fails."""
    # In an environment there is no installing for a user, and a new pip is none of our business.
    environment = dict(os.environ, PIP_USER="0", PIP_DISABLE_PIP_VERSION_CHECK="1")
    if subprocess.call(command, cwd=ROOT, env=environment) != 0:
        sys.exit("install.py: " + failed)


def say(line):
    print(line)
    sys.stdout.flush()


def shown(path):
    return os.path.relpath(path, ROOT) if path.startswith(ROOT + os.sep) else path


def main(arguments):
    usage = "usage: python3 install.py [run|test] [--venv DIR]"
    if "-h" in arguments or "--help" in arguments:
        print(usage)
        return 0
    refused = refusal(sys.version_info[:2], platform.system(), platform.machine(), missing_modules())
    if refused:
        sys.exit("install.py: " + refused)
    folder = os.path.join(ROOT, ".venv")
    if "--venv" in arguments[:-1]:
        at = arguments.index("--venv")
        folder = arguments[at + 1]
        arguments = arguments[:at] + arguments[at + 2 :]
    kind = arguments[0] if arguments else "run"
    if kind not in KINDS or len(arguments) > 1:
        sys.exit(usage)
    environment = Environment(folder)
    os.chdir(ROOT)
    if not environment.ready(kind):
        environment.make()
        environment.install(kind)
        say("ready: `. %s/bin/activate` puts panax on this terminal's path" % shown(environment.folder))
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit("install.py: stopped; run the same command again")
