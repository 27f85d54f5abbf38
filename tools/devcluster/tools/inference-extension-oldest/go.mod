module specdecode.io/devcluster/tools/inference-extension-oldest

go 1.25.0

require sigs.k8s.io/gateway-api-inference-extension v0.3.0 // indirect
