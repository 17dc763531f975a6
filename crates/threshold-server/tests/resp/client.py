"""Calls CL.THROTTLE as a service would, and fails if an answer is not as expected."""

import sys

import redis

port, token = int(sys.argv[1]), sys.argv[2]
for protocol in [2, 3]:
    client = redis.Redis(port=port, password=token or None, protocol=protocol, client_name="test")
    assert client.ping() and client.echo("hello") == b"hello"
    key = f"python{protocol}"
    call = ["CL.THROTTLE", key, 9, 1, 3600]
    assert client.execute_command(*call) == [0, 10, 9, -1, 3600]
    pipeline = client.pipeline(transaction=False)
    for _ in range(100):
        pipeline.execute_command(*call)
    answers = pipeline.execute()
    assert [answer[0] for answer in answers] == 9 * [0] + 91 * [1], answers
    assert all(0 < answer[3] <= 3600 for answer in answers[9:]), answers
    # A transaction, as pipelines are by default, charges nothing, and its error says what to do.
    other = ["CL.THROTTLE", f"transaction{protocol}", 9, 1, 3600]
    transaction = client.pipeline()
    for _ in range(3):
        transaction.execute_command(*other)
    try:
        transaction.execute()
    except redis.ResponseError as error:
        assert "no transactions" in str(error), error
    else:
        raise AssertionError("there are no transactions")
    try:
        client.pipeline().watch("key")
    except redis.ResponseError as error:
        assert "no transactions" in str(error), error
    else:
        raise AssertionError("nothing can be watched")
    assert client.execute_command(*other) == [0, 10, 9, -1, 3600]
    try:
        client.execute_command("CL.THROTTLE", key, 9, 0, 60)
    except redis.ResponseError as error:
        assert "Zero rates" in str(error), error
    else:
        raise AssertionError("a rate of zero is an error")
    assert client.client_getname() in ("test", b"test")
if token:
    try:
        redis.Redis(port=port, password="wrong").ping()
    except redis.AuthenticationError:
        pass
    else:
        raise AssertionError("a wrong token is refused")
