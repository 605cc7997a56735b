"""Headers in which servers, and commands of their user, say who asks: only a socket, or an assertion, may carry them.

A module of its own, because a client elsewhere needs it, and `servers.py` needs what only Unix has.
"""

PRINCIPAL_HEADER = "Belljar-Principal"
OPERATOR_HEADER = "Belljar-Operator"
NAME_HEADER = "Belljar-Name"
VIA_HEADER = "Belljar-Via"
SPEAKER_HEADERS = (PRINCIPAL_HEADER, OPERATOR_HEADER, NAME_HEADER, VIA_HEADER)
"""What a request over that socket says of who asks. Over TCP, credentials say it, and these are refused."""
CALLER_HEADER = "Belljar-Caller"
HOPS_HEADER = "Belljar-Hops"
CALL_HEADER = "Belljar-Call"
SCHEME_HEADER = "Belljar-Scheme"
ASSERTION_HEADER = "Belljar-Assertion"
FLEET_HEADERS = (CALLER_HEADER, HOPS_HEADER, CALL_HEADER, SCHEME_HEADER, ASSERTION_HEADER)
"""What a server says of a request that it passes on: whose it is, how many have passed it on, by what name it is
cancelled, whether it came over TLS, and between machines that it may say so. Refused likewise."""
