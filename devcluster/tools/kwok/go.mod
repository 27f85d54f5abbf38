module specdecode.io/devcluster/tools/kwok

go 1.24.0
