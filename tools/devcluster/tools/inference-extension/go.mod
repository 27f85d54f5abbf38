module specdecode.io/devcluster/tools/inference-extension

go 1.25.0

require sigs.k8s.io/gateway-api-inference-extension v1.5.0 // indirect
