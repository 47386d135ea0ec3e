# SPDX-License-Identifier: Apache-2.0
"""Runs a chat template, which a stranger wrote: without access to Python's objects, in bounded time and memory."""
import contextlib
import json
import re
import secrets
import signal

from spillway_data import Problem, load_package

SECONDS = 10
MOST_CHARACTERS = 1 << 26
MOST_BYTES = 2 << 30  # that a rendering may take beside what the process has
MOST_REPEATS = 1 << 20


class TimeIsUp(BaseException):
    """Not an Exception: nothing that runs inside a template may take it for one of its own."""


@contextlib.contextmanager
def bounded():
    """Ends what runs too long or takes too much memory, where the system can."""
    with limited_memory():
        if not hasattr(signal, "setitimer"):
            yield
            return
        def expire(*_):
            raise TimeIsUp
        before = signal.signal(signal.SIGALRM, expire)
        signal.setitimer(signal.ITIMER_REAL, SECONDS)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)


@contextlib.contextmanager
def limited_memory():
    try:
        import resource
        with open("/proc/self/statm", encoding="ascii") as sizes:
            now = int(sizes.read().split()[0]) * resource.getpagesize()
        soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    except (ImportError, OSError):
        yield
        return
    limits = [limit for limit in (soft, hard) if limit != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_AS, (min([now + MOST_BYTES, *limits]), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def make_environment(marks):
    """Jinja as Hugging Face sets it up for chat templates; text in {% generation %} comes between the two marks."""
    jinja2 = load_package("jinja2", "a chat template")
    from jinja2 import ext, nodes, sandbox

    class Generation(ext.Extension):
        tags = {"generation"}

        def parse(self, parser):
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("mark"), [], [], body).set_lineno(line)

        def mark(self, caller):
            return marks[0] + caller() + marks[1]

    class Environment(sandbox.ImmutableSandboxedEnvironment):
        intercepted_binops = frozenset(["*", "**"])

        def call_binop(self, context, operator, left, right):
            if operator == "**" or is_large(left, right):
                raise sandbox.SecurityError(f"{operator} of these is not allowed in a template")
            return left * right

    def refuse(message):
        raise jinja2.TemplateError(message)

    # Not optimised: what is constant would be computed while the template is read.
    environment = Environment(trim_blocks=True, lstrip_blocks=True, optimized=False,
                              extensions=[Generation, ext.loopcontrols])
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = refuse
    return environment


def to_json(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def is_large(left, right):
    numbers = [value for value in (left, right) if isinstance(value, (int, float))]
    if len(numbers) == 2:
        return any(abs(value) > 1e9 for value in numbers)
    sizes = [len(value) for value in (left, right) if hasattr(value, "__len__")]
    return bool(numbers and sizes) and sizes[0] * numbers[0] > MOST_REPEATS


class SourceTemplate:
    def __init__(self, name, source):
        self.name = name
        self.marks = tuple(f"\x02{secrets.randbelow(10 ** 30)}{end}\x03" for end in "()")  # no text can hold them
        environment = make_environment(self.marks)
        with self.problems(name):
            self.template = environment.from_string(source)
            self.marks_responses = bool(re.search(r"\{%-?\s*generation\s*[-+]?%\}", source))

    @contextlib.contextmanager
    def problems(self, where):
        """What goes wrong in a template, as a Problem."""
        try:
            with bounded():
                yield
        except TimeIsUp:
            raise Problem(f"{where}: the chat template {self.name} did not end within {SECONDS} s") from None
        except MemoryError:
            raise Problem(f"{where}: the chat template {self.name} takes more than {MOST_BYTES >> 20} MiB") from None
        except RecursionError:
            raise Problem(f"{where}: the chat template {self.name} is nested too deep") from None
        except Exception as error:  # a template can raise anything
            line = getattr(error, "lineno", None)
            place = f", line {line}" if line else ""
            words = str(error)[:300] or "no reason given"
            raise Problem(f"{where}: the chat template {self.name}{place}: {type(error).__name__}: {words}") from None

    def render(self, where, **variables):
        """The text, and the parts of it that the template marked."""
        with self.problems(where):
            text = self.template.render(**variables)
        if len(text) > MOST_CHARACTERS:
            raise Problem(f"{where}: the chat template {self.name} makes more than {MOST_CHARACTERS} characters of it")
        if not self.marks_responses:
            return text, []
        pieces = re.split(f"({'|'.join(map(re.escape, self.marks))})", text)
        if pieces[1::2] != list(self.marks) * (len(pieces) // 4):
            raise Problem(f"{where}: the chat template {self.name} has {{% generation %}} blocks inside each other")
        return without_marks(pieces[::2])


def without_marks(parts):
    """Puts a text together, every second part of which was marked, and says where those are."""
    spans, length = [], 0
    for number, part in enumerate(parts):
        if number % 2 == 1 and part:
            spans.append((length, length + len(part)))
        length += len(part)
    return "".join(parts), spans
