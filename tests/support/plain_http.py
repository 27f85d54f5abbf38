"""HTTP requests to servers of a test, which have no certificates.

Requests bypass the environment's proxies, which cannot reach these servers. By default, httpx loads all certificate
authorities for each request. This takes 20 ms of CPU time, too much for polling.
"""

from functools import partial

import httpx

get = partial(httpx.get, trust_env=False, verify=False)
post = partial(httpx.post, trust_env=False, verify=False)
stream = partial(httpx.stream, trust_env=False, verify=False)
