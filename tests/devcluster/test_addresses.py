from ipaddress import ip_address, ip_network
from itertools import combinations

from devcluster.host.sandbox import MAX_CLUSTERS, Addresses


def test_ten_thousand_services_have_an_address_in_every_cluster_and_no_two_clusters_share_one() -> None:
    clusters = [Addresses(index) for index in range(MAX_CLUSTERS)]
    for cluster in clusters:
        services = ip_network(cluster.services)
        assert services.num_addresses > 10_000
        assert ip_address(cluster.api_service) == services[1]
    ranges = [ip_network(text, strict=False) for cluster in clusters for text in cluster.ranges]
    assert not [pair for pair in combinations(ranges, 2) if pair[0].overlaps(pair[1])]
