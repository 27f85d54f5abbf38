import socket
import subprocess
import sys
from ipaddress import ip_address, ip_network
from itertools import combinations

from devcluster.cluster.settings import free_ports
from devcluster.host.sandbox import MAX_CLUSTERS, Addresses


def test_ten_thousand_services_have_an_address_in_every_cluster_and_no_two_clusters_share_one() -> None:
    clusters = [Addresses(index) for index in range(MAX_CLUSTERS)]
    for cluster in clusters:
        services = ip_network(cluster.services)
        assert services.num_addresses > 10_000
        assert ip_address(cluster.api_service) == services[1]
    ranges = [ip_network(text, strict=False) for cluster in clusters for text in cluster.ranges]
    assert not [pair for pair in combinations(ranges, 2) if pair[0].overlaps(pair[1])]


FREE = """
import sys
from devcluster.cluster import settings
settings._PORTS = range(int(sys.argv[1]), int(sys.argv[1]) + 1)
print(settings.free_ports(1))
"""


def is_free_for_another_process(port: int) -> bool:
    done = subprocess.run([sys.executable, "-c", FREE, str(port)], capture_output=True, text=True, check=False)
    assert done.returncode == 0 or "are free on this machine" in done.stderr
    return done.returncode == 0


def test_a_port_is_reserved_before_it_is_bound_and_free_after_the_process() -> None:
    (port,) = free_ports(1)
    assert not is_free_for_another_process(port)
    socket.create_server(("127.0.0.1", port)).close()
    script = "from devcluster.cluster.settings import free_ports; print(*free_ports(1))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert is_free_for_another_process(int(done.stdout))


def test_a_port_that_is_bound_is_not_free() -> None:
    (port,) = free_ports(1)
    with socket.create_server(("127.0.0.1", port)):
        assert not is_free_for_another_process(port)
