"""Makes Panax's environment in .venv, so that nothing of the system's Python changes. Run it again at any time.

    python3 install.py                   what training takes
    python3 install.py --extra cuda13    the same for NVIDIA GPUs; or cuda12, tpu, or any extra of pyproject.toml, repeated
    python3 install.py test              what the tests take too
    python3.13 install.py newest         what tests/newest.txt takes, on the newest JAX that pyproject.toml allows
    python3 install.py --kernels FILE    what training takes, and kernels for CPUs from a wheel: for machines without a C compiler

What is there already is left as it is. pip reads its own configuration. Nothing here needs a new Python to be parsed, so that
an old one can say what is wrong.
"""

import hashlib
import os
import platform
import shlex
import subprocess
import sys

ROOT = os.path.dirname(os.path.realpath(__file__))
OLDEST = (3, 11)

KINDS = {
    "run": ((), ("run",)),
    "test": (("test",), ("test", "run")),
    "newest": (("newest",), ("newest", "run")),
}
"""What can be installed: the project's extras, and the kinds that it holds."""

OLDEST_OF_NEWEST = (3, 12)
"""The oldest Python that the newest JAX runs on."""

WITHOUT_DEPENDENCIES = {"recommenders": ("test",), "published": ("test",)}
"""Lists in requirements/ that are installed without what they depend on, since only files of theirs are read, and who takes each:
these kinds, and an extra of its name."""

ONE_OF = ("cuda12", "cuda13", "tpu")
"""Extras of which an environment takes one."""


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
        self.named_extras = os.path.join(self.folder, "panax-extras.txt")
        self.made = os.path.join(self.folder, "panax-made.txt")

    def stamp(self, kind):
        """The file that says what was installed."""
        return os.path.join(self.folder, "panax-" + kind + ".txt")

    def extras(self):
        """The extras that were asked for so far: where requirements change, these are installed again too."""
        return read(self.named_extras).split()

    def with_held(self, extras):
        """Extras, and those that it has. It ends with a sentence where they exclude each other."""
        every = sorted(set(self.extras()) | set(extras))
        clash = [each for each in every if each in ONE_OF]
        if len(clash) > 1:
            sys.exit(
                "install.py: %s exclude each other, and %s would have both; make another environment with --venv DIR"
                % (" and ".join(clash), shown(self.folder))
            )
        return every

    def wanted(self, kind):
        """Return the text of a kind's stamp: which clone was installed, and with which requirements."""
        digest = hashlib.sha256()
        for name in ["pyproject.toml"] + ["requirements/%s.txt" % each for each in sorted(KINDS[kind][1])]:
            with open(os.path.join(ROOT, name), "rb") as file:
                digest.update(file.read())
        for each in WITHOUT_DEPENDENCIES:
            digest.update(read(os.path.join(ROOT, "requirements", each + ".txt")).encode())
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
        places = (self.folder, os.path.realpath(self.folder))
        # Python 3.13 quotes what a shell would read otherwise.
        return not any(each in script or shlex.quote(each) in script for each in places)

    def own(self):
        """Whether this program has made it: what others have made is never removed."""
        names = [self.made, self.named_extras] + [self.stamp(kind) for kind in KINDS]
        return any(os.path.isfile(name) for name in names)

    def ready(self, kind, extras=()):
        """Whether all that `kind` and extras take is there."""
        held = [each for each in KINDS if kind in KINDS[each][1]]
        return (
            any(read(self.stamp(each)) == self.wanted(each) for each in held)
            and set(extras) <= set(self.extras())
            and not self.moved()
            and self.works("panax")
        )

    def make(self):
        """Make it where it is missing, and again where this program has made it and it does not work, or was moved."""
        if os.path.islink(self.folder) and not os.path.isdir(self.folder):
            sys.exit("install.py: %s is a link to what is not there; remove it" % self.folder)
        if os.path.isfile(os.path.join(self.folder, "pyvenv.cfg")):
            if self.works("pip") and not self.moved():
                return
            if not self.own():
                self.complete()
                return
            say("making %s again: it does not work here" % shown(self.folder))
        elif os.path.isdir(self.folder) and os.listdir(self.folder):
            sys.exit("install.py: %s is not a virtual environment; move it away" % self.folder)
        else:
            say("making %s with Python %s" % (shown(self.folder), platform.python_version()))
        run([sys.executable, "-m", "venv", "--clear", self.folder], "could not make %s" % self.folder)
        with open(self.made, "w") as file:
            file.write("made by install.py, which may make it again\n")

    def complete(self):
        """Put pip into an environment that others have made without it, as `uv venv` does; or end with a sentence."""
        other = "move it away, or name another folder with --venv"
        if self.moved():
            sys.exit("install.py: %s was made elsewhere, and not by this program; %s" % (self.folder, other))
        if not self.works():
            sys.exit("install.py: the Python of %s does not start, or is too old; %s" % (self.folder, other))
        say(
            "%s has no pip, and was not made by this program: it gets pip, and what is there stays" % shown(self.folder)
        )
        run([self.python, "-m", "ensurepip", "--default-pip"], "could not put pip into %s; %s" % (self.folder, other))

    def install(self, kind, extras=()):
        """Install what `kind` and extras take, with its stamp written last."""
        for each in KINDS:
            if os.path.exists(self.stamp(each)):
                os.remove(self.stamp(each))
        # Written first: should pip fail, the same command without extras still brings them.
        with open(self.named_extras, "w") as file:
            file.write("".join(each + "\n" for each in extras))
        requirements = os.path.join("requirements", kind + ".txt")
        count = sum("==" in line and not line.startswith((" ", "#")) for line in read(requirements).split("\n"))
        say("installing the %d packages of %s; this takes minutes where they must be fetched" % (count, requirements))
        pip = [self.python, "-m", "pip", "install", "--quiet"]
        advice = "pip could not install %s; see above what it says, then run the same command again" % requirements
        run(pip + ["-r", requirements], advice)
        every = ",".join(KINDS[kind][0] + tuple(extras))
        if extras:
            say("installing %s; pip chooses versions by pyproject.toml" % " and ".join(extras))
            advice = advice.replace(requirements, "%s and .[%s]" % (requirements, every))
        run(pip + ["--no-build-isolation", "-e", ".[%s]" % every if every else "."], advice)
        for each in WITHOUT_DEPENDENCIES:
            alone = os.path.join("requirements", each + ".txt")
            if each in extras or kind in WITHOUT_DEPENDENCIES[each]:
                say("installing the packages of %s without what they depend on: only their files are read" % alone)
                run(pip + ["--no-deps", "-r", alone], advice.replace(requirements, alone))
        with open(self.stamp(kind), "w") as file:
            file.write(self.wanted(kind))

    def install_kernels(self, wheel):
        """Install a wheel of kernels for CPUs, in place of the one that is there."""
        say("installing %s" % shown(wheel))
        pip = [self.python, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--force-reinstall", wheel]
        run(pip, "pip could not install %s; it must be built for this system and processor" % wheel)


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


def known_extras():
    """The names in pyproject.toml that `--extra` takes."""
    # From Python 3.11 on, as this is only asked where Panax can be installed.
    import tomllib

    with open(os.path.join(ROOT, "pyproject.toml"), "rb") as file:
        project = tomllib.load(file)["project"]
    return sorted(set(project.get("optional-dependencies", {})) - set(KINDS))


def values_of(flag, arguments):
    """What stands after each `flag`, and the arguments without them."""
    values, rest = [], list(arguments)
    while flag in rest[:-1]:
        at = rest.index(flag)
        values.append(rest[at + 1])
        del rest[at : at + 2]
    return values, rest


def main(arguments):
    usage = "usage: python3 install.py [run|test|newest] [--extra NAME]... [--kernels FILE] [--venv DIR]"
    if "-h" in arguments or "--help" in arguments:
        print(usage)
        return 0
    refused = refusal(sys.version_info[:2], platform.system(), platform.machine(), missing_modules())
    if refused:
        sys.exit("install.py: " + refused)
    folders, arguments = values_of("--venv", arguments)
    extras, arguments = values_of("--extra", arguments)
    wheels, arguments = values_of("--kernels", arguments)
    kind = arguments[0] if arguments else "run"
    if kind not in KINDS or len(arguments) > 1 or len(folders) > 1 or len(wheels) > 1:
        sys.exit(usage)
    if kind == "newest" and sys.version_info[:2] < OLDEST_OF_NEWEST:
        sys.exit(
            "install.py: the newest JAX needs Python %d.%d or newer, and this is %d.%d; run `python3.13 install.py newest`"
            % (OLDEST_OF_NEWEST + tuple(sys.version_info[:2]))
        )
    for each in extras:
        if each not in known_extras():
            sys.exit("install.py: there is no extra %r; choose from %s" % (each, ", ".join(known_extras())))
    wheels = [os.path.abspath(each) for each in wheels]
    for each in wheels:
        if not os.path.isfile(each):
            sys.exit("install.py: %s does not exist; build it with `python wheels/build.py dist`" % each)
    environment = Environment(folders[0] if folders else os.path.join(ROOT, ".venv"))
    extras = environment.with_held(extras)
    os.chdir(ROOT)
    ready = environment.ready(kind, extras)
    if not ready:
        environment.make()
        environment.install(kind, extras)
    for each in wheels:
        environment.install_kernels(each)
    if not ready or wheels:
        say("ready: `. %s/bin/activate` puts panax on this terminal's path" % shown(environment.folder))
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit("install.py: stopped; run the same command again")
