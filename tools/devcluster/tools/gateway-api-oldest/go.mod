module specdecode.io/devcluster/tools/gateway-api-oldest

go 1.25.0

require sigs.k8s.io/gateway-api v1.1.0 // indirect
