module specdecode.io/devcluster/tools/keda

go 1.26

require github.com/kedacore/keda/v2 v2.21.0 // indirect
