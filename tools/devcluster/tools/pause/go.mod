module specdecode.io/devcluster/tools/pause

go 1.21
