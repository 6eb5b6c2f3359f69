"""The form of messages and the exit codes, which scripts rely on."""

from tridock.errors import ClusterError, Problem, RequestError, RunError


def test_a_problem_reads_where_what_got_todo() -> None:
    assert str(Problem("a.yaml: x", "is wrong", "3", "use 4")) == "a.yaml: x: is wrong; got 3; use 4"
    assert str(Problem("host-a", "does not answer", "", "start it")) == "host-a: does not answer; start it"


def test_the_nearest_values_are_not_part_of_the_message() -> None:
    assert str(Problem("x", "is wrong", "3", "use 2 or 4", (2, 4))) == "x: is wrong; got 3; use 2 or 4"


def test_another_process_reads_the_fields_of_a_message() -> None:
    problem = Problem("a: b", "c", "d; e", "f")
    assert Problem.of(problem.message) == problem


def test_an_error_shows_all_its_problems_one_a_line() -> None:
    error = RequestError([Problem("a", "b", "c", "d"), Problem("e", "f", "g", "h")])
    assert str(error) == "a: b; got c; d\ne: f; got g; h"


def test_exit_codes() -> None:
    assert (RequestError.exit_code, ClusterError.exit_code, RunError.exit_code) == (2, 3, 4)


def test_no_control_character_of_a_value_reaches_the_terminal() -> None:
    problem = Problem("data.data_path", "is missing", "a\x1b[2Jb\x9bc\rd", "bring\tit\nhere")
    assert str(problem) == "data.data_path: is missing; got a\\x1b[2Jb\\x9bc\\x0dd; bring\tit\nhere"
