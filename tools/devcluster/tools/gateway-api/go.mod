module specdecode.io/devcluster/tools/gateway-api

go 1.25.0

require sigs.k8s.io/gateway-api v1.5.1 // indirect
