"""HTTP requests to servers of a test, which have no certificates.

The environment's proxies know nothing of them. httpx itself reads all certificate authorities for each request, which
takes 20 ms of a processor: too long for polling.
"""

from functools import partial

import httpx

get = partial(httpx.get, trust_env=False, verify=False)
post = partial(httpx.post, trust_env=False, verify=False)
stream = partial(httpx.stream, trust_env=False, verify=False)
