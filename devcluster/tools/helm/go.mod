module specdecode.io/devcluster/tools/helm

go 1.24.0
